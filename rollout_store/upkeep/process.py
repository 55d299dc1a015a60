"""The process `onlinerl maintain`: makes a pass over the tables at every interval."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from onlinerl.errors import LeaseHeld, OnlineRLError
from onlinerl.process.fault_streak import FaultStreak
from onlinerl.process.health import HealthServer
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.rollout_store.upkeep import metrics
from onlinerl.rollout_store.upkeep.config import MaintenanceConfig, RetentionConfig
from onlinerl.rollout_store.upkeep.tables import TableUpkeep, maintain

logger = logging.getLogger(__name__)

LEASE = "maintain"
ACTOR = "maintain"
LATE_INTERVALS, LATE_S = 4, 3_600.0
"""The process is not ready when it was silent for the longer of these intervals and seconds."""
MAX_WAIT_S = LATE_S / 2
"""Longest wait after failed passes, unless the interval is longer."""


def run_maintain(
    store: DeltaStore, *, config: MaintenanceConfig, retention: RetentionConfig, once: bool
) -> int:
    """Make passes until SIGTERM or SIGINT, or a single pass.

    Args:
        store: Where the tables lie.
        config: Intervals, sizes and the health port.
        retention: For how long rows are kept.
        once: Make one pass and return.

    Raises:
        LeaseHeld: only with `once`, when another process makes a pass.
        ServiceUnavailable: only with `once`, when the storage does not answer.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    maintainer = Maintainer(store, config=config, retention=retention)
    if once:
        maintainer.run_pass(stop)
        return 0
    with HealthServer(config.health_host, config.health_port, ready=maintainer.ready):
        logger.info("maintain keeps up %s", store.root)
        maintainer.run(stop)
    logger.info("maintain stopped")
    return 0


class _Stopped(Exception):
    """Ends a pass between two tables."""


class Maintainer:
    """WAITING -> PASSING (holds the lease) -> WAITING, until stopped.

    While another process holds the lease it stays WAITING and tries again at the next interval.
    After a failed pass it waits longer, and it is not ready until a pass succeeds.

    Args:
        store: Where the tables lie.
        config: Intervals and sizes.
        retention: For how long rows are kept.
        now: The time.
        clock: Seconds of a clock that never goes back.
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
        self._faults = FaultStreak(max_wait_s=MAX_WAIT_S)

    def ready(self) -> str | None:
        """None while the process is ready, else the reason why it is not."""
        silent_s = self._clock() - self._seen_at
        if silent_s > max(LATE_S, LATE_INTERVALS * self._config.interval_s):
            return f"the last sign of life was {silent_s:.0f} s ago"
        return self._faults.trouble

    def run(self, stop: threading.Event) -> None:
        """Make a pass at every interval until `stop` is set; a failed pass is repeated later."""
        while not stop.is_set():
            try:
                self.run_pass(stop)
                self._faults.clear()
            except LeaseHeld as error:
                metrics.PASSES.labels("lease_held").inc()
                logger.info("another process keeps the tables up: %s", error)
            except OnlineRLError as error:
                metrics.PASSES.labels("failed").inc()
                if self._faults.add(str(error)):
                    logger.warning("a pass failed: %s", error)
            except Exception:
                metrics.PASSES.labels("failed").inc()
                self._faults.add("an unexpected error, see the log")
                logger.exception("a pass failed")
            self._seen_at = self._clock()
            stop.wait(self._faults.wait_s(self._config.interval_s))

    def run_pass(self, stop: threading.Event) -> list[TableUpkeep]:
        """Make one pass under the lease; it ends between two tables when `stop` is set.

        Raises:
            LeaseHeld: another process holds the lease, or took it over.
            ServiceUnavailable: the storage does not answer.
        """
        started_at, results = self._clock(), []
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
                    results.append(upkeep)
                    _count(upkeep)
            except _Stopped:
                return results
        metrics.PASSES.labels("whole").inc()
        metrics.LAST_PASS.set(self._now().timestamp())
        metrics.PASS_SECONDS.set(self._clock() - started_at)
        return results


def _count(upkeep: TableUpkeep) -> None:
    metrics.COMPACTED.labels(upkeep.table).inc(upkeep.compacted.num_files_before)
    metrics.CONFLICTS.labels(upkeep.table).inc(upkeep.compacted.num_conflicts)
    metrics.REMOVED.labels(upkeep.table).inc(upkeep.num_files_removed)
    metrics.LOG_REMOVED.labels(upkeep.table).inc(upkeep.num_log_files_removed)
    metrics.HELD.labels(upkeep.table).set(upkeep.num_held_versions)
    if upkeep.trouble is not None:
        metrics.TROUBLED.labels(upkeep.table).inc()
    if upkeep.changed:
        logger.info(
            "kept up",
            extra={
                "table": upkeep.table,
                "compacted": f"{upkeep.compacted.num_files_before}"
                f" into {upkeep.compacted.num_files_after}",
                "removed": upkeep.num_files_removed,
                "log_removed": upkeep.num_log_files_removed,
            },
        )
