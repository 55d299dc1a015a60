"""Reads what the deploy controller decided about arms, off the event loop.

While the table cannot be read the last known arms hold: an unreachable store ends no canary, and no
request waits for the store.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from onlinerl.errors import ServiceUnavailable
from onlinerl.process.fault_streak import FaultStreak
from onlinerl.rollout_store.schema import ArmRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore, storage_errors
from onlinerl.serving.config import ArmsConfig
from onlinerl.serving.observability.routing_metrics import RoutingMetrics
from onlinerl.serving.routing.arms import Arms, read_newest

logger = logging.getLogger(__name__)

ArmsSource = Callable[[], Sequence[ArmRow]]
"""Reads all decisions of all policies. It runs in a thread of its own and may block."""


class ArmsReader:
    """Reads the table each `poll_s` seconds and passes on arms that changed.

    There is one read at a time, in a thread of its own. A store that hangs blocks that thread only,
    and is read again once it answers.

    Args:
        source: Reads the rows.
        policy: Name of the policy whose arms are wanted.
        config: How often to read, and how long to wait.
        apply: Called on the event loop with arms that differ from those before.
        metrics: What is counted.
    """

    def __init__(
        self,
        source: ArmsSource,
        *,
        policy: str,
        config: ArmsConfig,
        apply: Callable[[Arms], None],
        metrics: RoutingMetrics,
    ) -> None:
        self._source = source
        self._policy = policy
        self._config = config
        self._apply = apply
        self._metrics = metrics
        self._reading: asyncio.Future[Arms] | None = None
        self._known = Arms()
        self._last_warning: str | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read once, waiting up to `timeout_s`, then go on reading in the background."""
        await self.look()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop reading; a read that hangs is left to its daemon thread."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def look(self) -> None:
        """Read the table once; a failure changes nothing but the counters."""
        if self._reading is None:
            self._reading = self._start_reading()
        done, _ = await asyncio.wait({self._reading}, timeout=self._config.timeout_s)
        if not done:
            self._note_failure("late", f"not read within {self._config.timeout_s:g} s")
            return
        reading, self._reading = self._reading, None
        error = reading.exception()
        if error is not None:
            if not isinstance(error, (ServiceUnavailable, OSError)):
                self._metrics.faults.labels("arms").inc()
                if repr(error) != self._last_warning:
                    logger.error("reading the arms failed unexpectedly", exc_info=error)
            self._note_failure("failed", str(error) or repr(error))
            return
        self._metrics.arms.reads.labels("ok").inc()
        self._metrics.arms.read_at.set(time.time())
        self._last_warning = None
        self._take(reading.result())

    def _start_reading(self) -> asyncio.Future[Arms]:
        """Read in a daemon thread, which does not keep the process from ending when it hangs."""
        loop = asyncio.get_running_loop()
        reading: asyncio.Future[Arms] = loop.create_future()

        def settle(arms: Arms | None, error: Exception | None) -> None:
            if reading.cancelled():
                return
            if error is not None:
                reading.set_exception(error)
            elif arms is not None:
                reading.set_result(arms)

        def read() -> None:
            arms, failure = None, None
            try:
                arms = read_newest(self._source(), policy=self._policy)
            except Exception as error:  # noqa: BLE001 the thread's border: `look` logs and counts it
                failure = error
            with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
                loop.call_soon_threadsafe(settle, arms, failure)

        threading.Thread(target=read, name="arms", daemon=True).start()
        return reading

    def _take(self, arms: Arms) -> None:
        if arms != self._known:
            logger.info("arms changed", extra={"arms": repr(arms)})
            self._known = arms
            self._apply(arms)

    def _note_failure(self, outcome: str, reason: str) -> None:
        self._metrics.arms.reads.labels(outcome).inc()
        if reason != self._last_warning:  # a store that is away for minutes is logged once
            logger.warning("the table of arms is not read: %s; the last known arms hold", reason)
        self._last_warning = reason

    async def _watch(self) -> None:
        faults = FaultStreak()
        while True:
            await asyncio.sleep(faults.wait_s(self._config.poll_s))
            try:
                await self.look()
            except Exception as error:
                # An error of ours must not end the reading: the arms would stay as they are.
                self._metrics.faults.labels("arms").inc()
                if faults.add(repr(error)):
                    logger.exception("reading the arms failed")
            else:
                faults.clear()


def arms_in(store: DeltaStore) -> ArmsSource:
    """The rows of a store; none while the table does not exist.

    Rows are parsed again only when the files of the table have changed, because parsing holds up
    the event loop.

    Raises:
        ServiceUnavailable: from the source, when the store cannot be read.
    """
    files: list[str] = []
    rows: Sequence[ArmRow] = []

    def read() -> Sequence[ArmRow]:
        nonlocal files, rows
        with storage_errors("read table arms"):
            if not store.exists("arms"):
                return []
            dataset = store.dataset("arms")
            if dataset.files != files:
                rows = [ArmRow.model_validate(row) for row in dataset.to_table().to_pylist()]
                files = dataset.files
        return rows

    return read
