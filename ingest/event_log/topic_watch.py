"""Checks that polled records belong to the topics that ingest thinks it reads."""

from collections.abc import Callable, Mapping

from onlinerl.ingest import metrics
from onlinerl.ingest.event_log.log import EventLog, Partition, PollResult
from onlinerl.rollout_store.event_log import Topic


class TopicWatch:
    """Asks the log for its topics after every poll that returned something.

    Args:
        log: Asked for topics and lags.
        topics: The topics that are being read.
        interval_s: Longest time between two checks, in seconds.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Mapping[str, Topic],
        *,
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._log = log
        self._topics = dict(topics)
        self._interval_s = interval_s
        self._clock = clock
        self._checked_at = clock()
        self.lags: Mapping[Partition, int] | None = None
        """Lag by partition as of the last check; None while it is unknown."""

    def confirms(self, result: PollResult) -> bool:
        """Whether the topics are still the same.

        Asks the log only when the poll returned something or the last check is `interval_s` ago;
        otherwise the answer is True.

        Raises:
            ServiceUnavailable: The log does not answer.
        """
        is_empty = not result.records and not result.restarted
        if is_empty and self._clock() - self._checked_at < self._interval_s:
            return True
        self._checked_at = self._clock()
        self.lags = self._log.lags()
        for (topic, partition), lag in (self.lags or {}).items():
            metrics.LAG.labels(topic, partition).set(lag)
        return dict(self._log.topics()) == self._topics
