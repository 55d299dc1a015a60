"""Reads the topics through one connection, until they are created anew."""

import logging
from collections.abc import Callable, Mapping

from onlinerl.errors import ServiceUnavailable, StoreConflict
from onlinerl.ingest import metrics
from onlinerl.ingest.committing.commit_thread import CommitThread
from onlinerl.ingest.committing.pending import PendingRecords
from onlinerl.ingest.committing.writer import TableWriter
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import EventLog, Partition, PollResult
from onlinerl.ingest.event_log.topic_watch import TopicWatch
from onlinerl.rollout_store.event_log import Topic

logger = logging.getLogger(__name__)

_BUSY_POLL_S = 0.05
"""Longest wait for records, in seconds, while a batch is due and another is being written."""


class TopicFollower:
    """Reads and commits: `OPENED -> ASSIGNED <-> PAUSED`, and ASSIGNED again after a rebalance.

    Args:
        log: Already opened for `topics`.
        topics: The topics as they are now. When they change, make another follower.
        writer: Stores the batches.
        commit_thread: Calls `writer.write`; owned by the caller.
        config: Sizes of batches, and waits.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Mapping[str, Topic],
        *,
        writer: TableWriter,
        commit_thread: CommitThread,
        config: IngestConfig,
        clock: Callable[[], float],
    ) -> None:
        self._log = log
        self._topics = topics
        self._writer = writer
        self._commit_thread = commit_thread
        self._config = config
        self._pending = PendingRecords(commit_thread, config=config, clock=clock)
        self._watch = TopicWatch(log, topics, interval_s=config.check_interval_s, clock=clock)
        self._partitions: frozenset[Partition] = frozenset()
        self._is_paused = False
        self.is_assigned = False
        """Whether the log has assigned partitions."""

    @property
    def lag(self) -> int | None:
        """Records not read yet, as of the last check; None while it is unknown."""
        lags = self._watch.lags
        return None if lags is None else sum(lags.values())

    def poll(self) -> PollResult | None:
        """Read once and write what is due; None when the topics were created anew or changed.

        Raises:
            StoreConflict: An exclusive writer was fenced.
            ServiceUnavailable: The log or the storage does not answer.
        """
        self._advance()
        self._pause_or_resume()
        try:
            result = self._log.poll(self._timeout_s())
            unchanged = self._watch.confirms(result)
        except ServiceUnavailable:
            self._flush()
            raise
        if not unchanged:
            self._flush()
            metrics.RECREATED.inc()
            logger.warning("topics were created anew or changed: reading them from the start")
            return None
        if result.assigned is not None:
            self._take_over(result.assigned)
        if result.restarted and not (self.finish() and self._restart(result)):
            # The partitions are read again and found to be cut again, so this is not the end.
            return PollResult(restarted=result.restarted)
        self._pending.add(result.records)
        self._advance()
        return result

    def is_at_the_end(self, result: PollResult) -> bool:
        """Whether every record of the log was read.

        Args:
            result: The last result of `poll`.
        """
        is_empty = not (result.records or result.restarted) and result.assigned is None
        if not is_empty or self._is_paused or not self.is_assigned:
            return False
        lags = self._log.lags()
        return lags is not None and not any(lags.values())

    def finish(self) -> bool:
        """Write all records; False when another process had stored some of them already.

        In that case the partitions are read again from where the tables end.
        """
        is_written = self._flush()
        if not is_written:
            self._take_over(self._partitions)
        return is_written

    def _timeout_s(self) -> float:
        if self._is_paused:
            self._commit_thread.wait(self._config.poll_timeout_s)
            return 0.0
        longest_s = self._config.poll_timeout_s
        return min(longest_s, _BUSY_POLL_S) if self._pending.is_waiting else longest_s

    def _pause_or_resume(self) -> None:
        if self._pending.is_full != self._is_paused:
            self._is_paused = not self._is_paused
            (self._log.pause if self._is_paused else self._log.resume)()
            metrics.PAUSED.set(len(self._partitions) if self._is_paused else 0)

    def _advance(self) -> None:
        try:
            self._pending.advance()
        except StoreConflict as error:
            self._drop_batch(error)
            self._take_over(self._partitions)

    def _flush(self) -> bool:
        try:
            self._pending.flush()
        except StoreConflict as error:
            self._drop_batch(error)
            return False
        return True

    def _drop_batch(self, error: StoreConflict) -> None:
        """Drop the records that were read: another process has, or had, some of the partitions.

        Raises:
            StoreConflict: This process was to read all partitions alone.
        """
        if self._config.mode == "assign":
            raise error
        metrics.CONFLICTS.inc()
        logger.warning("a batch was dropped: %s", error)
        self._pending.drop()

    def _take_over(self, partitions: frozenset[Partition]) -> None:
        """Drop the records that were read, and read these partitions from where the tables end."""
        try:
            self._commit_thread.settle()
        except StoreConflict as error:
            self._drop_batch(error)
        self._pending.drop()
        self._partitions, self.is_assigned, self._is_paused = partitions, True, False
        self._log.seek(self._writer.align(self._topics, partitions))
        metrics.REASSIGNED.inc()
        metrics.PARTITIONS.set(len(partitions))
        metrics.PAUSED.set(0)
        logger.info("reading %d partitions", len(partitions))

    def _restart(self, result: PollResult) -> bool:
        """Go on at the earliest record; False when another process has these partitions."""
        try:
            self._writer.restart(result.restarted)
        except StoreConflict as error:
            self._drop_batch(error)
            self._take_over(self._partitions)
            return False
        for topic, partition in result.restarted:
            metrics.RESTARTED.labels(topic).inc()
            logger.error(
                "the stored offset of %s/%d is not in the log: records were lost before ingest "
                "read them, or the log was cut; going on at its earliest record",
                topic,
                partition,
            )
        return True
