"""The process `onlinerl maintain`: a pass over the tables, again and again."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from onlinerl.errors import LeaseHeld, OnlineRLError
from onlinerl.process.health import HealthServer
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.rollout_store.upkeep import metrics
from onlinerl.rollout_store.upkeep.config import MaintenanceConfig, RetentionConfig
from onlinerl.rollout_store.upkeep.tables import TableUpkeep, maintain

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

LEASE = "maintain"
ACTOR = "maintain"
LATE_INTERVALS, LATE_S = 4, 3_600.0
"""Intervals, and seconds, that may pass without a pass before the process says it is not well."""


def run_maintain(settings: "Settings", *, once: bool) -> int:
    """Keep the tables up until SIGTERM or SIGINT, or for one pass.

    Raises:
        LeaseHeld: only with `once`, when another process is at it.
        ServiceUnavailable: only with `once`, when the storage does not answer.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    maintainer = Maintainer(store, config=settings.maintenance, retention=settings.retention)
    if once:
        maintainer.run_pass(stop)
        return 0
    config = settings.maintenance
    with HealthServer(config.health_host, config.health_port, ready=maintainer.ready):
        logger.info("maintain keeps up %s", store.root)
        maintainer.run(stop)
    logger.info("maintain stopped")
    return 0


class _Stopped(Exception):
    """Ends a pass between two tables."""


class Maintainer:
    """WAITING -> PASSING (holds the lease) -> WAITING, until stopped.

    While another process holds the lease it stays WAITING and looks again at the next interval.
    """

    def __init__(
        self,
        store: DeltaStore,
        *,
        config: MaintenanceConfig,
        retention: RetentionConfig,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._config = config
        self._retention = retention
        self._now = now
        self._clock = clock
        self._seen_at = clock()
        self._trouble: str | None = None

    def ready(self) -> str | None:
        """None while it is well, else why not."""
        silent_s = self._clock() - self._seen_at
        if silent_s > max(LATE_S, LATE_INTERVALS * self._config.interval_s):
            return f"the last sign of life was {silent_s:.0f} s ago"
        return self._trouble

    def run(self, stop: threading.Event) -> None:
        """A pass at every interval; whatever goes wrong is tried again at the next one."""
        while not stop.is_set():
            try:
                self.run_pass(stop)
                self._trouble = None
            except LeaseHeld as error:
                metrics.PASSES.labels("lease_held").inc()
                logger.info("another process keeps the tables up: %s", error)
            except OnlineRLError as error:
                metrics.PASSES.labels("failed").inc()
                self._trouble = str(error)
                logger.warning("a pass failed: %s", error)
            except Exception:
                metrics.PASSES.labels("failed").inc()
                self._trouble = "an unexpected error, see the log"
                logger.exception("a pass failed")
            self._seen_at = self._clock()
            stop.wait(self._config.interval_s)

    def run_pass(self, stop: threading.Event) -> list[TableUpkeep]:
        """One pass under the lease; ends early, between two tables, when `stop` is set.

        Raises:
            LeaseHeld: another process is at it, or took over.
            ServiceUnavailable: the storage does not answer.
        """
        began, done = self._clock(), []
        self._store.create()
        lease = Lease(self._store, name=LEASE, ttl_s=self._config.lease_ttl_s)

        def keep_alive() -> None:
            self._seen_at = self._clock()
            if stop.is_set():
                raise _Stopped
            lease.renew()

        with lease:
            try:
                for upkeep in maintain(
                    self._store,
                    config=self._config,
                    retention=self._retention,
                    actor=ACTOR,
                    now=self._now,
                    keep_alive=keep_alive,
                ):
                    done.append(upkeep)
                    _count(upkeep)
            except _Stopped:
                return done
        metrics.PASSES.labels("whole").inc()
        metrics.LAST_PASS.set(self._now().timestamp())
        metrics.PASS_SECONDS.set(self._clock() - began)
        return done


def _count(done: TableUpkeep) -> None:
    metrics.COMPACTED.labels(done.table).inc(done.compacted.num_files_before)
    metrics.CONFLICTS.labels(done.table).inc(done.compacted.num_conflicts)
    metrics.REMOVED.labels(done.table).inc(done.num_files_removed)
    metrics.LOG_REMOVED.labels(done.table).inc(done.num_log_files_removed)
    metrics.HELD.labels(done.table).set(done.num_held_versions)
    if done.trouble is not None:
        metrics.TROUBLED.labels(done.table).inc()
    if done.changed:
        logger.info(
            "kept up",
            extra={
                "table": done.table,
                "compacted": f"{done.compacted.num_files_before}"
                f" into {done.compacted.num_files_after}",
                "removed": done.num_files_removed,
                "log_removed": done.num_log_files_removed,
            },
        )
