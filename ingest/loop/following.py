"""One incarnation of the topics, read through one connection until they change."""

import logging
from collections.abc import Callable, Mapping

from onlinerl.errors import ServiceUnavailable, StoreConflict
from onlinerl.ingest import metrics
from onlinerl.ingest.committing.gathering import Gathering
from onlinerl.ingest.committing.lane import CommitLane
from onlinerl.ingest.committing.writer import TableWriter
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import EventLog, Fetched, Partition
from onlinerl.ingest.event_log.topic_watch import TopicWatch
from onlinerl.rollout_store.event_log import Topic

logger = logging.getLogger(__name__)

_BUSY_POLL_S = 0.05
"""Longest wait for records while a batch is due that cannot be begun yet."""


class Following:
    """`OPENED -> ASSIGNED <-> PAUSED`, and ASSIGNED again whenever partitions change hands.

    Args:
        log: Was opened for `topics`.
        topics: As they are now; when they change, this is over.
        writer: Its `write` is what the lane calls.
        lane: Outlives this object.
        config: Batches and waits.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Mapping[str, Topic],
        *,
        writer: TableWriter,
        lane: CommitLane,
        config: IngestConfig,
        clock: Callable[[], float],
    ) -> None:
        self._log = log
        self._topics = topics
        self._writer = writer
        self._lane = lane
        self._config = config
        self._gathering = Gathering(lane, config=config, clock=clock)
        self._watch = TopicWatch(log, topics, interval_s=config.check_interval_s, clock=clock)
        self._owned: frozenset[Partition] = frozenset()
        self._is_paused = False
        self.is_assigned = False
        """Whether it was told which partitions to read."""

    @property
    def lag(self) -> int | None:
        """Records that were not read yet, as of the last look; None while it is unknown."""
        lags = self._watch.lags
        return None if lags is None else sum(lags.values())

    def poll(self) -> Fetched | None:
        """Read once and write what is due; None when the topics are not the same any more.

        Raises:
            StoreConflict: an exclusive writer was fenced.
            ServiceUnavailable: the log or the storage is away.
        """
        self._advance()
        self._hold_back()
        try:
            fetched = self._log.poll(self._timeout_s())
            unchanged = self._watch.confirms(fetched)
        except ServiceUnavailable:
            self._flush()
            raise
        if not unchanged:
            self._flush()
            metrics.RECREATED.inc()
            logger.warning("topics were created anew or changed: reading them from the start")
            return None
        if fetched.assigned is not None:
            self._take_over(fetched.assigned)
        if fetched.restarted and not (self.finish() and self._start_over(fetched)):
            # Everything is read again, and what was cut off found again: this is not the end.
            return Fetched(restarted=fetched.restarted)
        self._gathering.add(fetched.records)
        self._advance()
        return fetched

    def is_at_the_end(self, fetched: Fetched) -> bool:
        """Whether the log holds nothing that was not read."""
        is_quiet = not (fetched.records or fetched.restarted) and fetched.assigned is None
        if not is_quiet or self._is_paused or not self.is_assigned:
            return False
        lags = self._log.lags()
        return lags is not None and not any(lags.values())

    def finish(self) -> bool:
        """Write what is left; False when another process had stored some of it already.

        What was not written then is read again.
        """
        is_written = self._flush()
        if not is_written:
            self._take_over(self._owned)
        return is_written

    def _timeout_s(self) -> float:
        if self._is_paused:
            self._lane.wait(self._config.poll_timeout_s)
            return 0.0
        longest_s = self._config.poll_timeout_s
        return min(longest_s, _BUSY_POLL_S) if self._gathering.is_waiting else longest_s

    def _hold_back(self) -> None:
        if self._gathering.is_full != self._is_paused:
            self._is_paused = not self._is_paused
            (self._log.pause if self._is_paused else self._log.resume)()
            metrics.PAUSED.set(len(self._owned) if self._is_paused else 0)

    def _advance(self) -> None:
        try:
            self._gathering.advance()
        except StoreConflict as error:
            self._give_way(error)
            self._take_over(self._owned)

    def _flush(self) -> bool:
        try:
            self._gathering.flush()
        except StoreConflict as error:
            self._give_way(error)
            return False
        return True

    def _give_way(self, error: StoreConflict) -> None:
        """Another process has some of these partitions now, or had them: drop what was read."""
        if self._config.mode == "assign":
            raise error
        metrics.CONFLICTS.inc()
        logger.warning("a batch was dropped: %s", error)
        self._gathering.drop()

    def _take_over(self, partitions: frozenset[Partition]) -> None:
        """Read these partitions from where the tables end, whatever was read of them before."""
        try:
            self._lane.settle()
        except StoreConflict as error:
            self._give_way(error)
        self._gathering.drop()
        self._owned, self.is_assigned, self._is_paused = partitions, True, False
        self._log.seek(self._writer.align(self._topics, partitions))
        metrics.REASSIGNED.inc()
        metrics.PARTITIONS.set(len(partitions))
        metrics.PAUSED.set(0)
        logger.info("reading %d partitions", len(partitions))

    def _start_over(self, fetched: Fetched) -> bool:
        """False when another process has these partitions: then they are read again."""
        try:
            self._writer.restart(fetched.restarted)
        except StoreConflict as error:
            self._give_way(error)
            self._take_over(self._owned)
            return False
        for topic, partition in fetched.restarted:
            metrics.RESTARTED.labels(topic).inc()
            logger.error(
                "the stored offset of %s/%d is not in the log: records were lost before ingest "
                "read them, or the log was cut; going on at its earliest record",
                topic,
                partition,
            )
        return True
