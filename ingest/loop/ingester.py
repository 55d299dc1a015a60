"""The loop: follow the log, gather batches, write them; outlive whatever is away for a while."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from onlinerl.errors import ServiceUnavailable, StoreConflict
from onlinerl.ingest import metrics
from onlinerl.ingest.batches.sorting import ROUTES
from onlinerl.ingest.committing.lane import CommitLane
from onlinerl.ingest.committing.writer import TableWriter
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import EventLog
from onlinerl.ingest.loop.following import Following
from onlinerl.ingest.loop.progress import Progress, Silent

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
        progress: Is told how far it is.
    """

    def __init__(
        self,
        open_log: Callable[[], EventLog],
        *,
        writer: TableWriter,
        config: IngestConfig,
        clock: Callable[[], float] = time.monotonic,
        progress: Progress | None = None,
    ) -> None:
        self._open_log = open_log
        self._writer = writer
        self._config = config
        self._clock = clock
        self._progress = progress or Silent()
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
            CommitStuck: a commit did not end.
            ServiceUnavailable: only with `once`; otherwise it waits and tries again.
        """
        lane = CommitLane(self._writer.write, timeout_s=self._config.max_commit_s)
        with contextlib.closing(lane):
            self._run(lane, stop, once=once)
        self._why_not_ready = "stopped"

    def _run(self, lane: CommitLane, stop: threading.Event, *, once: bool) -> None:
        done = False
        while not (done or stop.is_set()):
            try:
                if not self._claimed:
                    self._writer.claim()
                    self._claimed = True
                with contextlib.closing(self._open_log()) as log:
                    done = self._follow(log, lane, stop, once=once)
            except StoreConflict as error:
                self._why_not_ready = f"fenced: {error}"
                raise
            except ServiceUnavailable as error:
                if once:
                    raise
                self._wait(stop, error)

    def _wait(self, stop: threading.Event, error: ServiceUnavailable) -> None:
        self._why_not_ready = str(error)
        metrics.UNAVAILABLE.inc()
        logger.warning("waiting %.1f s: %s", self._backoff_s, error)
        stop.wait(self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, self._config.max_backoff_s)

    def _follow(
        self, log: EventLog, lane: CommitLane, stop: threading.Event, *, once: bool
    ) -> bool:
        """Read one incarnation of the topics. False when they changed, True when done."""
        topics = log.topics()
        if missing := sorted({route.topic for route in ROUTES} - set(topics)):
            raise ServiceUnavailable(f"the broker has no topic {', '.join(missing)}")
        log.open(topics)
        following = Following(
            log,
            topics,
            writer=self._writer,
            lane=lane,
            config=self._config,
            clock=self._clock,
        )
        while not stop.is_set():
            fetched = following.poll()
            if fetched is None:
                return False
            if following.is_assigned:
                self._why_not_ready, self._backoff_s = None, _FIRST_BACKOFF_S
            self._progress.report(self._writer.num_records, lag=following.lag)
            if once and following.is_at_the_end(fetched) and following.finish():
                break
        following.finish()
        self._progress.report(self._writer.num_records, lag=0 if once else None)
        return True
