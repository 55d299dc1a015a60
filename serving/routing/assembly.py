"""Builds a router from its parts: engines, their pool and the arms."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.interaction.engine import Engine
from onlinerl.serving.observability.routing_metrics import RoutingMetrics
from onlinerl.serving.routing.arms_reader import ArmsReader, ArmsSource
from onlinerl.serving.routing.replicas import ReplicaPool
from onlinerl.serving.routing.router import Router


def make_router(
    engines: Sequence[Engine],
    *,
    policy: str,
    config: GatewayConfig,
    registry: CollectorRegistry,
    key: str | None = None,
    arms: ArmsSource | None = None,
) -> Router:
    """A router over `engines`, not started yet.

    Args:
        engines: All engines.
        policy: Name of the policy.
        config: The gateway's configuration.
        registry: Where the metrics are registered.
        key: Key of the hash that draws sessions for arms. Gateways with the same key draw the same
            sessions; without a key, a caller can choose its arm by choosing a session id.
        arms: Reads the decisions; None serves the champion alone.
    """
    metrics = RoutingMetrics(registry)
    pool = ReplicaPool(
        engines,
        policy=policy,
        poll_s=config.timeouts.poll_s,
        config=config.routing,
        metrics=metrics,
    )
    # The prefix keeps these hashes apart from those of users, which may have the same key.
    router = Router(
        pool, config=config.routing, metrics=metrics, key=f"arms of {policy}: {key or ''}".encode()
    )
    if arms is not None:
        router.reader = ArmsReader(
            arms, policy=policy, config=config.arms, apply=router.set_arms, metrics=metrics
        )
    return router
