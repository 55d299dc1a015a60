"""Gives every request its arm and its replica.

The arm comes from the session and what the deploy controller decided; the replica from the session
too, so that it finds its prefix there, unless that replica is far busier than the others.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.policy_version import PolicyVersion
from onlinerl.rollout_store.schema import Arm
from onlinerl.serving.config import RoutingConfig
from onlinerl.serving.observability.routing_metrics import RoutingMetrics
from onlinerl.serving.routing.arms import Arms, Target
from onlinerl.serving.routing.arms_reader import ArmsReader
from onlinerl.serving.routing.failover import Route
from onlinerl.serving.routing.rendezvous import is_overloaded, preferred
from onlinerl.serving.routing.replicas import Replica, ReplicaPool


@dataclass(frozen=True, kw_only=True)
class Lane:
    """An arm with what may answer for it now."""

    arm: Arm
    probability: float
    """With which a session is given this arm, as things stand now."""
    replicas: Sequence[Replica]
    adapter: str | None = None


class Router:
    """Routes requests of one policy. Lives in one event loop; remembers `max_sessions` places.

    Args:
        pool: The engines.
        config: How load and session are weighed.
        metrics: What is counted.
        key: Under which sessions are hashed to arms; the same for every gateway of a policy.
    """

    def __init__(
        self, pool: ReplicaPool, *, config: RoutingConfig, metrics: RoutingMetrics, key: bytes
    ) -> None:
        self.pool = pool
        self.arms = Arms()
        self.reader: ArmsReader | None = None
        """Tells what is decided; without one the champion takes all."""
        self.metrics = metrics
        self._config = config
        self._key = key
        self._places: OrderedDict[str, str] = OrderedDict()
        self._turn = 0
        pool.asks_adapters = lambda: self.arms.uses_adapters

    async def start(self) -> None:
        """Look at every engine and at the arms once, then go on looking."""
        await asyncio.gather(*(self.pool.look(replica) for replica in self.pool.replicas))
        if self.reader is not None:
            await self.reader.start()
        self.pool.start()

    async def close(self) -> None:
        """Stop looking."""
        await self.pool.close()
        if self.reader is not None:
            await self.reader.close()

    def decide(self, arms: Arms) -> None:
        """What holds for every request from now on."""
        self.arms = arms

    def route(self, *, session_id: str, known: bool, tenant: str) -> Route:
        """Where the answer to a request comes from.

        Args:
            session_id: Of the request.
            known: False when the gateway has just made the id up: nothing is cached anywhere.
            tenant: Whose prefixes it may share.

        Raises:
            RequestRefused: with 503 when no engine serves the policy.
        """
        lane = self._lane(session_id)
        if not lane.replicas:
            reason = self.pool.fault() or f"only a shadow serves {self.pool.policy!r}"
            raise RequestRefused(reason, 503, None, "engine_unavailable")
        self.metrics.arms.labels(lane.arm).inc()
        replica = self._choose(lane.replicas, session_id=session_id, known=known)
        return self._route(lane, replica, tenant=tenant, session_id=session_id)

    def draws_shadow(self, interaction_id: str) -> bool:
        """Whether a request is to be answered a second time."""
        return self.arms.draws_shadow(interaction_id, key=self._key)

    def shadow_route(self, *, tenant: str) -> Route | None:
        """Where a second answer comes from; None when no replica of the shadow is ready."""
        shadow = self.arms.shadow
        replicas = self._hosts(shadow) if shadow is not None else []
        if shadow is None or not replicas:
            return None
        lane = Lane(
            arm="shadow", probability=shadow.share, replicas=replicas, adapter=shadow.adapter
        )
        return self._route(lane, self._least_busy(replicas), tenant=tenant)

    def alternative(self, route: Route, *, tried: Collection[Replica]) -> Replica | None:
        """Another replica for an answer that has not begun: of its version before any other.

        The session goes on there: that is where its prefix is cached from now on.
        """
        left = [
            replica for replica in self._group(route.arm, route.adapter) if replica not in tried
        ]
        if not left:
            return None
        same = [replica for replica in left if replica.version == route.replica_version]
        replica = self._least_busy(same or left)
        if route.session_id is not None:
            self._remember(route.session_id, replica)
        return replica

    def _route(
        self, lane: Lane, replica: Replica, *, tenant: str, session_id: str | None = None
    ) -> Route:
        return Route(
            self.pool,
            session_id=session_id,
            replica=replica,
            arm=lane.arm,
            probability=lane.probability,
            adapter=lane.adapter,
            tenant=tenant,
            alternative=self.alternative,
            max_continuations=self._config.max_continuations,
            metrics=self.metrics,
        )

    def _lane(self, session_id: str) -> Lane:
        canary = self.arms.canary
        if canary is None:
            return self._champion(1.0)
        hosts = self._hosts(canary)
        if not hosts:
            # Every session is given the champion then, those drawn for the canary included.
            if self.arms.draws_canary(session_id, key=self._key):
                self.metrics.arm_fallbacks.labels("canary").inc()
            return self._champion(1.0)
        if self.arms.draws_canary(session_id, key=self._key):
            return _lane_of(canary, hosts, probability=canary.share)
        champion = self._champion(1.0 - canary.share)
        if champion.replicas:
            return champion
        # As while a canary is promoted: it is on every replica before a decision says so.
        self.metrics.arm_fallbacks.labels("champion").inc()
        return _lane_of(canary, hosts, probability=1.0)

    def _champion(self, probability: float) -> Lane:
        champion = self.arms.champion
        adapter = None if champion is None else champion.adapter
        group = self._group("champion", adapter)
        if adapter is not None and not group:
            # The weights under the adapter passed their gates too.
            self.metrics.arm_fallbacks.labels("champion").inc()
            adapter, group = None, self._group("champion", None)
        return Lane(arm="champion", probability=probability, replicas=group, adapter=adapter)

    def _group(self, arm: Arm, adapter: str | None) -> list[Replica]:
        """The replicas that may answer for an arm now."""
        target = self.arms.canary if arm == "canary" else self.arms.shadow
        if arm != "champion":
            return self._hosts(target) if target is not None else []
        free = [replica for replica in self.pool.serving() if not self._is_pinned(replica)]
        return [replica for replica in free if adapter is None or adapter in replica.adapters]

    def _hosts(self, target: Target) -> list[Replica]:
        if target.adapter is not None:
            return [r for r in self.pool.serving() if target.adapter in r.adapters]
        return [r for r in self.pool.serving() if r.version == self._version(target)]

    def _is_pinned(self, replica: Replica) -> bool:
        return any(
            target is not None
            and target.adapter is None
            and replica.version == self._version(target)
            and not self._is_everywhere(target)
            for target in (self.arms.canary, self.arms.shadow)
        )

    def _is_everywhere(self, target: Target) -> bool:
        """Only a promotion puts a version on all replicas, so a shadow's may serve then.

        A replica that is down counts by what it told last: that a shadow's replica alone is left
        makes nobody promote it.
        """
        return target.arm == "shadow" and all(
            replica.told == self._version(target) for replica in self.pool.replicas
        )

    def _version(self, target: Target) -> str:
        return str(PolicyVersion(self.pool.policy, target.version))

    def _choose(self, group: Sequence[Replica], *, session_id: str, known: bool) -> Replica:
        by_url = {replica.url: replica for replica in group}
        place = self._places.get(session_id)
        if place not in by_url:
            place = preferred(session_id, by_url) if known or place is not None else None
        by = "session"
        if place is None:
            by, replica = "least_load", self._least_busy(group)
        elif self._is_overloaded(by_url[place], group):
            by, replica = "spill", self._least_busy(group)
        else:
            replica = by_url[place]
        self.metrics.routed.labels(replica.url, by).inc()
        self._remember(session_id, replica)
        return replica

    def _is_overloaded(self, replica: Replica, group: Sequence[Replica]) -> bool:
        return is_overloaded(
            replica.num_running,
            [each.num_running for each in group],
            factor=self._config.load_factor,
            slack=self._config.load_slack,
        )

    def _least_busy(self, group: Sequence[Replica]) -> Replica:
        """Equally busy ones take turns."""
        self._turn += 1
        start = self._turn % len(group)
        return min([*group[start:], *group[:start]], key=lambda replica: replica.num_running)

    def _remember(self, session_id: str, replica: Replica) -> None:
        self._places[session_id] = replica.url
        self._places.move_to_end(session_id)
        while len(self._places) > self._config.max_sessions:
            self._places.popitem(last=False)


def _lane_of(target: Target, replicas: Sequence[Replica], *, probability: float) -> Lane:
    return Lane(arm=target.arm, probability=probability, replicas=replicas, adapter=target.adapter)
