"""Which engines a request may go to.

An engine is in the pool while it is healthy and reports a version of the policy. One that was
restarted and not yet seeded again reports `default` and gets no request.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onlinerl.errors import EngineFailed
from onlinerl.process.fault_streak import FaultStreak
from onlinerl.rollout_store.policy_version import PolicyVersion
from onlinerl.serving.config import RoutingConfig
from onlinerl.serving.interaction.engine import Engine
from onlinerl.serving.observability.routing_metrics import RoutingMetrics
from onlinerl.serving.routing.health import Health, points_of_look, points_of_request

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """An engine as the pool sees it."""

    engine: Engine
    health: Health
    reported_version: str | None = None
    """The version of the policy that it reported last; None when it reported anything else."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that it has loaded; only looked up while an arm is an adapter."""
    num_running: int = 0
    """Completions that it samples for this gateway."""
    reason: str = "not looked at yet"
    """Why it is not in the pool."""

    @property
    def version(self) -> str | None:
        """The version it serves; None keeps it out of the pool."""
        return None if self.health.is_out else self.reported_version

    @property
    def url(self) -> str:
        """Its address."""
        return self.engine.url


class ReplicaPool:
    """Checks every engine each `poll_s` seconds, and is told how requests went.

    Args:
        engines: All engines; only the configuration names them.
        policy: Name of the policy.
        poll_s: Seconds between two checks of one engine.
        config: When a replica leaves and returns.
        metrics: What is counted.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        policy: str,
        poll_s: float,
        config: RoutingConfig,
        metrics: RoutingMetrics,
    ) -> None:
        self.replicas = [
            Replica(engine, Health(config.eject_after, config.return_after)) for engine in engines
        ]
        self.asks_adapters: Callable[[], bool] = lambda: False
        """Whether a check also asks which adapters are loaded."""
        self.policy = policy
        self._poll_s = poll_s
        self._metrics = metrics
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to check the engines."""
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def close(self) -> None:
        """Stop checking."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def serving(self) -> list[Replica]:
        """The replicas that requests may go to."""
        return [replica for replica in self.replicas if replica.version is not None]

    def fault(self) -> str | None:
        """Why no request can be served; None when one can."""
        if self.serving():
            return None
        reasons = sorted({replica.reason for replica in self.replicas})
        return f"no engine serves {self.policy!r}: {'; '.join(reasons)}"

    def versions(self) -> list[str]:
        """The versions in the pool."""
        return sorted({replica.version for replica in self.replicas if replica.version})

    def report(self) -> list[dict[str, object]]:
        """Every replica, in the form of the readiness endpoint."""
        return [
            {
                "engine": replica.url,
                "ready": replica.version is not None,
                "version": replica.version,
                "running": replica.num_running,
                "reason": None if replica.version is not None else replica.reason,
            }
            for replica in self.replicas
        ]

    def note_version(self, replica: Replica, version: str) -> None:
        """Take the version that an engine reported, in a check or in an answer."""
        if PolicyVersion.find(version, policy=self.policy) is not None:
            self._change(replica, version=version)
        else:
            self._change(replica, version=None, reason=f"an engine serves {version!r}")

    def note_success(self, replica: Replica) -> None:
        """Note that a completion reached its end."""
        replica.health.note_answer()

    def note_failure(self, replica: Replica, error: EngineFailed) -> None:
        """Note that a request failed."""
        points = points_of_request(error)
        if points:
            self._count(replica, error, points=points, kind="request")

    async def look(self, replica: Replica) -> None:
        """Check one engine: ask what it serves."""
        try:
            version = await replica.engine.weight_version()
            if self.asks_adapters():
                replica.adapters = await replica.engine.adapters()
        except EngineFailed as error:
            self._count(replica, error, points=points_of_look(error), kind="look")
        else:
            was_out = replica.health.is_out
            replica.health.note_good_look(is_needed=not self.serving())
            self.note_version(replica, version)
            if was_out and not replica.health.is_out:
                logger.info("replica returned", extra={"engine": replica.url})
        self._show(replica)

    def _count(self, replica: Replica, error: EngineFailed, *, points: int, kind: str) -> None:
        self._metrics.replicas.failures.labels(replica.url, kind).inc()
        # An engine's words about a request may quote it, and this reason is logged and shown.
        why = error.message if kind == "look" else f"a request failed with status {error.status}"
        if replica.health.note_failure(points):
            self._metrics.replicas.ejections.labels(replica.url).inc()
            logger.warning("replica ejected", extra={"engine": replica.url, "reason": why})
        if replica.version is None:
            replica.reason = f"an engine does not answer: {why}"
        self._show(replica)

    def _change(self, replica: Replica, *, version: str | None, reason: str = "") -> None:
        if version != replica.reported_version:
            logger.info(
                "replica changed",
                extra={"engine": replica.url, "version": version, "reason": reason},
            )
        replica.reported_version = version
        if version is None or not replica.health.is_out:
            replica.reason = reason
        self._show(replica)

    def _show(self, replica: Replica) -> None:
        self._metrics.replicas.ready.labels(replica.url).set(replica.version is not None)

    async def _watch(self, replica: Replica) -> None:
        faults = FaultStreak()
        while True:
            await asyncio.sleep(faults.wait_s(self._poll_s))
            try:
                await self.look(replica)
            except Exception as error:
                # An error of ours must not end the checks: the replica would stay as it is.
                self._metrics.faults.labels("replicas").inc()
                if faults.add(repr(error)):
                    logger.exception("checking a replica failed", extra={"engine": replica.url})
            else:
                faults.clear()
