"""The loop: follow the log, gather batches, write them; outlive whatever is away for a while."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping

from onlinerl.errors import ServiceUnavailable, StoreConflict
from onlinerl.ingest import metrics
from onlinerl.ingest.batch import ROUTES
from onlinerl.ingest.buffer import TopicBuffer
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.log import EventLog, Fetched
from onlinerl.ingest.writer import TableWriter
from onlinerl.rollout_store.kafka_topics import Topic

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1


class Ingester:
    """`STARTING -> FOLLOWING <-> WAITING`, until stopped or fenced.

    Only records are buffered that were read while the topics were known to be the same: the check
    follows every poll that brought some. So a batch always belongs to the topic ids it is stored
    under, and may be committed while the broker is away.

    Args:
        open_log: Connects to the event log; called again after every interruption.
        writer: Owned by this object.
        config: Batches and waits.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        open_log: Callable[[], EventLog],
        *,
        writer: TableWriter,
        config: IngestConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_log = open_log
        self._writer = writer
        self._config = config
        self._clock = clock
        self._claimed = False
        self._backoff_s = _FIRST_BACKOFF_S
        self._why_not_ready: str | None = "starting"

    def ready(self) -> str | None:
        """None while it follows the log, else the reason why not."""
        return self._why_not_ready

    def run(self, stop: threading.Event, *, once: bool = False) -> None:
        """Follow the log until `stop` is set; what is buffered then is written first.

        Args:
            stop: Set from another thread or a signal handler.
            once: Return when everything in the log was written.

        Raises:
            StoreConflict: a newer ingest took over.
            ServiceUnavailable: only with `once`; otherwise it waits and tries again.
        """
        done = False
        while not (done or stop.is_set()):
            try:
                if not self._claimed:
                    self._writer.claim()
                    self._claimed = True
                with contextlib.closing(self._open_log()) as log:
                    done = self._follow(log, stop, once=once)
            except StoreConflict as error:
                self._why_not_ready = f"fenced: {error}"
                raise
            except ServiceUnavailable as error:
                if once:
                    raise
                self._wait(stop, error)
        self._why_not_ready = "stopped"

    def _wait(self, stop: threading.Event, error: ServiceUnavailable) -> None:
        self._why_not_ready = str(error)
        metrics.UNAVAILABLE.inc()
        logger.warning("waiting %.1f s: %s", self._backoff_s, error)
        stop.wait(self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, self._config.max_backoff_s)

    def _follow(self, log: EventLog, stop: threading.Event, *, once: bool) -> bool:
        """Read one incarnation of the topics. False when they changed, True when done."""
        topics = log.topics()
        if missing := sorted({route.topic for route in ROUTES} - set(topics)):
            raise ServiceUnavailable(f"the broker has no topic {', '.join(missing)}")
        log.assign(self._writer.align(topics))
        buffers = {route.topic: TopicBuffer(self._config, clock=self._clock) for route in ROUTES}
        watch = _TopicWatch(
            log, topics, interval_s=self._config.check_interval_s, clock=self._clock
        )
        while not stop.is_set():
            try:
                fetched = log.poll(self._config.poll_timeout_s)
                unchanged = watch.confirms(fetched)
            except ServiceUnavailable:
                self._flush(buffers)
                raise
            if not unchanged:
                self._flush(buffers)
                metrics.RECREATED.inc()
                logger.warning("topics were created anew or changed: reading them from the start")
                return False
            self._why_not_ready, self._backoff_s = None, _FIRST_BACKOFF_S
            self._take(fetched, buffers)
            if once and not fetched.records and log.lag() == 0:
                break
        self._flush(buffers)
        return True

    def _take(self, fetched: Fetched, buffers: Mapping[str, TopicBuffer]) -> None:
        if fetched.restarted:
            self._flush(buffers)
        for topic, partition in fetched.restarted:
            self._writer.restart((topic, partition))
            metrics.RESTARTED.labels(topic).inc()
            logger.error(
                "the stored offset of %s/%d is not in the log: records were lost before ingest "
                "read them, or the log was cut; going on at its earliest record",
                topic,
                partition,
            )
        for route in ROUTES:
            buffer = buffers[route.topic]
            buffer.add([record for record in fetched.records if record.topic == route.topic])
            if buffer.is_due():
                self._writer.write(route, buffer.take())

    def _flush(self, buffers: Mapping[str, TopicBuffer]) -> None:
        for route in ROUTES:
            self._writer.write(route, buffers[route.topic].take())


class _TopicWatch:
    """Confirms that what was fetched came from the topics that were assigned."""

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

    def confirms(self, fetched: Fetched) -> bool:
        """Ask the log when there is something to confirm, or when the last time is long ago."""
        quiet = not fetched.records and not fetched.restarted
        if quiet and self._clock() - self._checked_at < self._interval_s:
            return True
        self._checked_at = self._clock()
        lag = self._log.lag()
        if lag is not None:
            metrics.LAG.set(lag)
        return dict(self._log.topics()) == self._topics
