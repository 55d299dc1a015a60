"""Routers over engines without a model, for tests of routing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from onlinerl.serving.config import GatewayConfig, RoutingConfig, TimeoutsConfig
from onlinerl.serving.engine_client.memory import MemoryEngine
from onlinerl.serving.interaction.engine import Chunk, Generate
from onlinerl.serving.routing.assembly import make_router
from onlinerl.serving.routing.failover import Route
from onlinerl.serving.routing.router import Router

TOKENS = [11, 12, 13, 14, 15, 2]
"""What every engine says."""


def say(request: Generate) -> Sequence[int]:
    """The tokens that the prompt does not end with yet, so that an answer can be gone on with."""
    given = list(request.token_ids[1:])
    assert given == TOKENS[: len(given)]
    return TOKENS[len(given) :]


@dataclass
class Fleet:
    """A started router and its engines."""

    router: Router
    engines: list[MemoryEngine]
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"onlinerl_gateway_{name}", labels) or 0.0

    async def look(self) -> None:
        for replica in self.router.pool.replicas:
            await self.router.pool.look(replica)

    def route(self, session_id: str = "s", *, known: bool = True, tenant: str = "acme") -> Route:
        return self.router.route(session_id=session_id, known=known, tenant=tenant)

    def picks(self, session_id: str, *, known: bool = True) -> str:
        return self.route(session_id, known=known).url


async def make_fleet(*versions: str, poll_s: float = 0.01, **routing: Any) -> Fleet:
    """One engine per version, looked at once."""
    engines = [
        MemoryEngine(say, url=f"memory://{n}", version=version)
        for n, version in enumerate(versions)
    ]
    registry = CollectorRegistry()
    config = GatewayConfig(routing=RoutingConfig(**routing), timeouts=TimeoutsConfig(poll_s=poll_s))
    router = make_router(engines, policy="assistant", config=config, registry=registry, key="k")
    fleet = Fleet(router, engines, registry)
    await fleet.look()
    return fleet


def ask(request_id: str = "r", **sampling: object) -> Generate:
    return Generate(
        request_id=request_id, token_ids=[1], sampling={"max_tokens": len(TOKENS), **sampling}
    )


async def sampled(route: Route, request: Generate | None = None) -> list[Chunk]:
    return [chunk async for chunk in route.generate(request or ask())]


def tokens_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def spans_of(chunk: Chunk) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in chunk.version_spans or ()]
