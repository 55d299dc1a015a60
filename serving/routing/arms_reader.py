"""Reads what the deploy controller decided about arms, off the event loop.

When the table cannot be read the last known arms hold: a canary does not end because a store is
away, and no request waits for it.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from onlinerl.rollout_store.schema import ArmRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.serving.config import ArmsConfig
from onlinerl.serving.observability.routing_metrics import RoutingMetrics
from onlinerl.serving.routing.arms import Arms, newest

logger = logging.getLogger(__name__)

ArmsSource = Callable[[], Sequence[ArmRow]]
"""All decisions of all policies; runs in a thread and may take its time."""


class ArmsReader:
    """Looks at the table each `poll_s` and passes on what changed.

    One read at a time, in a thread of its own: a store that hangs holds that thread and nothing
    else, and is looked at again when it lets go.

    Args:
        source: Where the rows come from.
        policy: Whose arms.
        config: How often, and for how long.
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
        self._said: str | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, then go on looking; waits up to `timeout_s` for the first look."""
        await self.look()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop looking; a read that hangs is left behind."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def look(self) -> None:
        """Read the table once; a failure changes nothing but the counters."""
        if self._reading is None:
            self._reading = self._start_reading()
        done, _ = await asyncio.wait({self._reading}, timeout=self._config.timeout_s)
        if not done:
            self._failed("late", f"not read within {self._config.timeout_s:g} s")
            return
        reading, self._reading = self._reading, None
        error = reading.exception()
        if error is not None:
            self._failed("failed", str(error) or repr(error))
            return
        self._metrics.arms.reads.labels("ok").inc()
        self._metrics.arms.read_at.set(time.time())
        self._said = None
        self._take(reading.result())

    def _start_reading(self) -> asyncio.Future[Arms]:
        """In a daemon thread: one that hangs must not keep the process from ending."""
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
                arms = newest(self._source(), policy=self._policy)
            except Exception as error:  # noqa: BLE001 the thread's border: it is said by `look`
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, arms, failure)

        threading.Thread(target=read, name="arms", daemon=True).start()
        return reading

    def _take(self, arms: Arms) -> None:
        if arms != self._known:
            logger.info("arms changed", extra={"arms": repr(arms)})
            self._known = arms
            self._apply(arms)

    def _failed(self, outcome: str, reason: str) -> None:
        self._metrics.arms.reads.labels(outcome).inc()
        if reason != self._said:  # a store that is away for minutes is said once
            logger.warning("the table of arms is not read: %s; the last known arms hold", reason)
        self._said = reason

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.poll_s)
            try:
                await self.look()
            except Exception:
                logger.exception("looking at the arms failed")


def arms_in(store: DeltaStore) -> ArmsSource:
    """The rows of a store; none where nobody has created the table.

    Rows are parsed only when the files of the table have changed, for the sake of the event loop.
    """
    known: tuple[list[str], Sequence[ArmRow]] = ([], [])

    def rows() -> Sequence[ArmRow]:
        nonlocal known
        if not store.exists("arms"):
            return []
        dataset = store.dataset("arms")
        if dataset.files != known[0]:
            found = [ArmRow.model_validate(row) for row in dataset.to_table().to_pylist()]
            known = dataset.files, found
        return known[1]

    return rows
