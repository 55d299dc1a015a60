"""The main loop: read the log, write batches, and wait while the log or the store is away."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from onlinerl.errors import ServiceUnavailable, StoreConflict
from onlinerl.ingest import metrics
from onlinerl.ingest.batches.sorting import ROUTES
from onlinerl.ingest.committing.commit_thread import CommitThread
from onlinerl.ingest.committing.writer import TableWriter
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import EventLog
from onlinerl.ingest.loop.progress import NoProgress, Progress
from onlinerl.ingest.loop.topic_follower import TopicFollower
from onlinerl.process.fault_streak import FaultStreak

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
"""Seconds to wait after a first fault; every further fault doubles it."""


class Ingester:
    """Copies the log into the tables: `STARTING -> FOLLOWING <-> WAITING`, until stopped or fenced.

    After every poll that returned records, and before these are buffered, it checks that the topics
    were not created anew. So a batch always belongs to the topic ids under which it is stored, and
    may be committed while the broker is away.

    Args:
        open_log: Connects to the event log; called again after every interruption.
        writer: Owned by this object.
        config: Sizes of batches, and waits.
        clock: Monotonic seconds.
        progress: Reports how many records were stored.
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
        self._progress = progress or NoProgress()
        self._claimed = False
        self._faults = FaultStreak(max_wait_s=config.max_backoff_s)
        self._why_not_ready: str | None = "starting"

    def ready(self) -> str | None:
        """Why ingest is not following the log; None while it does."""
        return self._faults.trouble or self._why_not_ready

    def run(self, stop: threading.Event, *, once: bool = False) -> None:
        """Follow the log until `stop` is set, then write the buffered records.

        Args:
            stop: Set from another thread or a signal handler.
            once: Return when everything in the log was written.

        Raises:
            StoreConflict: A newer ingest took over.
            CommitStuck: A commit took longer than `max_commit_s`.
            ServiceUnavailable: Only with `once`; otherwise `run` waits and tries again.
        """
        commit_thread = CommitThread(self._writer.write, timeout_s=self._config.max_commit_s)
        with contextlib.closing(commit_thread):
            self._run(commit_thread, stop, once=once)
        self._faults.clear()
        self._why_not_ready = "stopped"

    def _run(self, commit_thread: CommitThread, stop: threading.Event, *, once: bool) -> None:
        done = False
        while not (done or stop.is_set()):
            try:
                if not self._claimed:
                    self._writer.claim()
                    self._claimed = True
                with contextlib.closing(self._open_log()) as log:
                    done = self._follow(log, commit_thread, stop, once=once)
            except StoreConflict as error:
                self._faults.clear()
                self._why_not_ready = f"fenced: {error}"
                raise
            except ServiceUnavailable as error:
                if once:
                    raise
                self._wait(stop, error)

    def _wait(self, stop: threading.Event, error: ServiceUnavailable) -> None:
        metrics.UNAVAILABLE.inc()
        is_new = self._faults.add(str(error))
        wait_s = self._faults.wait_s(min(_FIRST_BACKOFF_S, self._config.max_backoff_s))
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "fault %d, waiting %.1f s: %s", self._faults.length, wait_s, error)
        stop.wait(wait_s)

    def _follow(
        self, log: EventLog, commit_thread: CommitThread, stop: threading.Event, *, once: bool
    ) -> bool:
        """Read until the topics change (False), or until everything is done (True)."""
        topics = log.topics()
        if missing := sorted({route.topic for route in ROUTES} - set(topics)):
            raise ServiceUnavailable(f"the broker has no topic {', '.join(missing)}")
        log.open(topics)
        follower = TopicFollower(
            log,
            topics,
            writer=self._writer,
            commit_thread=commit_thread,
            config=self._config,
            clock=self._clock,
        )
        while not stop.is_set():
            result = follower.poll()
            if result is None:
                return False
            if follower.is_assigned:
                self._why_not_ready = None
                self._faults.clear()
            self._progress.report(self._writer.num_records, lag=follower.lag)
            if once and follower.is_at_the_end(result) and follower.finish():
                break
        follower.finish()
        self._progress.report(self._writer.num_records, lag=0 if once else None)
        return True
