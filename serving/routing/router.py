"""Gives every request its arm and its replica.

The arm follows from the session and the deploy controller's decision. The replica follows from the
session, whose prefix it has cached, unless that replica is far busier than the others.
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
from onlinerl.serving.routing.failover import Assignment, Route
from onlinerl.serving.routing.rendezvous import choose_name, is_overloaded
from onlinerl.serving.routing.replicas import Replica, ReplicaPool


@dataclass(frozen=True, kw_only=True)
class ArmReplicas:
    """An arm and the replicas that may answer for it now."""

    arm: Arm
    probability: float
    """Probability with which a session is given this arm now."""
    replicas: Sequence[Replica]
    adapter: str | None = None


class Router:
    """Routes the requests of one policy. It belongs to one event loop.

    Args:
        pool: The engines.
        config: How load and session are weighed, and how many sessions are remembered.
        metrics: What is counted.
        key: Key of the hash that gives sessions to arms; the same in every gateway of a policy.
    """

    def __init__(
        self, pool: ReplicaPool, *, config: RoutingConfig, metrics: RoutingMetrics, key: bytes
    ) -> None:
        self.pool = pool
        self.arms = Arms()
        self.reader: ArmsReader | None = None
        """Reads the decisions about arms; without one the champion answers everything."""
        self.metrics = metrics
        self._config = config
        self._key = key
        self._url_of_session: OrderedDict[str, str] = OrderedDict()
        """Replica that holds the prefix of a session, the least recent session first."""
        self._turn = 0
        pool.asks_adapters = lambda: self.arms.uses_adapters

    async def start(self) -> None:
        """Check every engine and read the arms once, then go on in the background."""
        await asyncio.gather(*(self.pool.look(replica) for replica in self.pool.replicas))
        if self.reader is not None:
            await self.reader.start()
        self.pool.start()

    async def close(self) -> None:
        """Stop the checks."""
        await self.pool.close()
        if self.reader is not None:
            await self.reader.close()

    def set_arms(self, arms: Arms) -> None:
        """Use these arms for every request from now on."""
        self.arms = arms

    def route(self, *, session_id: str, known: bool, tenant: str) -> Route:
        """Choose the arm and the replica of a request.

        Args:
            session_id: Session of the request.
            known: False when the gateway has just made the id, so that no replica has its prefix.
            tenant: Tenant whose cached prefixes the request may share.

        Raises:
            RequestRefused: with 503, when no engine serves the policy.
        """
        chosen = self._choose_arm(session_id)
        if not chosen.replicas:
            reason = self.pool.fault() or f"only a shadow serves {self.pool.policy!r}"
            raise RequestRefused(reason, 503, None, "engine_unavailable")
        self.metrics.arms.requests.labels(chosen.arm).inc()
        replica = self._choose(chosen.replicas, session_id=session_id, known=known)
        return self._route(chosen, replica, tenant=tenant, session_id=session_id)

    def draws_shadow(self, interaction_id: str) -> bool:
        """Whether the shadow answers a request as well."""
        return self.arms.draws_shadow(interaction_id, key=self._key)

    def shadow_route(self, *, tenant: str) -> Route | None:
        """The route of a shadow's answer; None when no replica of the shadow is ready."""
        shadow = self.arms.shadow
        replicas = self._hosts(shadow) if shadow is not None else []
        if shadow is None or not replicas:
            return None
        chosen = _with_replicas(shadow, replicas, probability=shadow.share)
        return self._route(chosen, self._least_busy(replicas), tenant=tenant)

    def choose_alternative(self, route: Route, *, tried: Collection[Replica]) -> Replica | None:
        """Choose another replica for an answer that has not begun, of the same version if possible.

        The session stays with that replica, which caches its prefix from now on.
        """
        left = [
            replica for replica in self._group(route.arm, route.adapter) if replica not in tried
        ]
        if not left:
            return None
        same = [replica for replica in left if replica.version == route.replica_version]
        replica = self._least_busy(same or left)
        session_id = route.assignment.session_id
        if session_id is not None:
            self._remember(session_id, replica)
        return replica

    def _route(
        self, chosen: ArmReplicas, replica: Replica, *, tenant: str, session_id: str | None = None
    ) -> Route:
        return Route(
            self.pool,
            Assignment(
                arm=chosen.arm,
                probability=chosen.probability,
                adapter=chosen.adapter,
                tenant=tenant,
                session_id=session_id,
            ),
            replica=replica,
            choose_alternative=self.choose_alternative,
            max_continuations=self._config.max_continuations,
            metrics=self.metrics,
        )

    def _choose_arm(self, session_id: str) -> ArmReplicas:
        canary = self.arms.canary
        if canary is None:
            return self._champion(1.0)
        hosts = self._hosts(canary)
        if not hosts:
            # The champion then answers every session, including those drawn for the canary.
            if self.arms.draws_canary(session_id, key=self._key):
                self.metrics.arms.fallbacks.labels("canary").inc()
            return self._champion(1.0)
        if self.arms.draws_canary(session_id, key=self._key):
            return _with_replicas(canary, hosts, probability=canary.share)
        champion = self._champion(1.0 - canary.share)
        if champion.replicas:
            return champion
        # While a canary is promoted, it is on every replica before the decision is stored.
        self.metrics.arms.fallbacks.labels("champion").inc()
        return _with_replicas(canary, hosts, probability=1.0)

    def _champion(self, probability: float) -> ArmReplicas:
        champion = self.arms.champion
        adapter = None if champion is None else champion.adapter
        group = self._group("champion", adapter)
        if adapter is not None and not group:
            # The weights under the adapter passed their gates as well.
            self.metrics.arms.fallbacks.labels("champion").inc()
            adapter, group = None, self._group("champion", None)
        return ArmReplicas(arm="champion", probability=probability, replicas=group, adapter=adapter)

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
        """Whether all replicas have a shadow's version, which only a promotion does.

        A replica that is down counts with the version that it reported last. Otherwise a shadow
        would serve as soon as its replica is the only one left.
        """
        return target.arm == "shadow" and all(
            replica.reported_version == self._version(target) for replica in self.pool.replicas
        )

    def _version(self, target: Target) -> str:
        return str(PolicyVersion(self.pool.policy, target.version))

    def _choose(self, group: Sequence[Replica], *, session_id: str, known: bool) -> Replica:
        by_url = {replica.url: replica for replica in group}
        url = self._url_of_session.get(session_id)
        if url not in by_url:
            url = choose_name(session_id, by_url) if known or url is not None else None
        by = "session"
        if url is None:
            by, replica = "least_load", self._least_busy(group)
        elif self._is_overloaded(by_url[url], group):
            by, replica = "spill", self._least_busy(group)
        else:
            replica = by_url[url]
        self.metrics.replicas.routed.labels(replica.url, by).inc()
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
        """The replica with the fewest running completions; equally busy ones take turns."""
        self._turn += 1
        start = self._turn % len(group)
        return min([*group[start:], *group[:start]], key=lambda replica: replica.num_running)

    def _remember(self, session_id: str, replica: Replica) -> None:
        self._url_of_session[session_id] = replica.url
        self._url_of_session.move_to_end(session_id)
        while len(self._url_of_session) > self._config.max_sessions:
            self._url_of_session.popitem(last=False)


def _with_replicas(
    target: Target, replicas: Sequence[Replica], *, probability: float
) -> ArmReplicas:
    return ArmReplicas(
        arm=target.arm, probability=probability, replicas=replicas, adapter=target.adapter
    )
