"""Whether what was fetched came from the topics that are being read."""

from collections.abc import Callable, Mapping

from onlinerl.ingest import metrics
from onlinerl.ingest.event_log.log import EventLog, Fetched, Partition
from onlinerl.rollout_store.event_log import Topic


class TopicWatch:
    """Asks the log which topics there are, after what it fetched.

    Args:
        log: Is asked.
        topics: What is expected.
        interval_s: Longest time between two questions.
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
        """Per partition, when it was asked last; None while it is unknown."""

    def confirms(self, fetched: Fetched) -> bool:
        """Ask when there is something to confirm, or when the last time is long ago."""
        quiet = not fetched.records and not fetched.restarted
        if quiet and self._clock() - self._checked_at < self._interval_s:
            return True
        self._checked_at = self._clock()
        self.lags = self._log.lags()
        for (topic, partition), lag in (self.lags or {}).items():
            metrics.LAG.labels(topic, partition).set(lag)
        return dict(self._log.topics()) == self._topics
