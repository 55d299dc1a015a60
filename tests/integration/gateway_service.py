"""A gateway behind a real port, in this process, for unmodified clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC, InteractionEvent
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.api.app import create_app
from onlinerl.serving.config import GatewayConfig, ResponsesConfig
from onlinerl.serving.engine_client.http import HttpEngine
from onlinerl.serving.feedback.recorder import FeedbackRecorder
from onlinerl.serving.gateway.answering import Gateway
from onlinerl.serving.interaction.events import MemorySink
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.protocols.responses.sqlite_store import SqliteResponseStore
from onlinerl.serving.rendering.loading import load_renderer
from onlinerl.serving.routing.assembly import make_router
from tests.serving.world import KEYS


@dataclass(frozen=True)
class Service:
    """What a test sees of it."""

    url: str
    gateway: Gateway
    sink: MemorySink

    async def logged(self, number: int) -> list[InteractionEvent]:
        """The interactions, when there are `number`."""
        async with asyncio.timeout(60):
            while len(self.sink.of(INTERACTIONS_TOPIC)) < number or self.gateway.num_in_flight:
                await asyncio.sleep(0.01)
        values = self.sink.of(INTERACTIONS_TOPIC)
        assert len(values) == number
        return [InteractionEvent.model_validate_json(value) for value in values]


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """The address of `app` on a free port."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def gateway_service(
    engine_url: str, *, model_dir: Path, folder: Path
) -> AsyncIterator[Service]:
    """A gateway before the engine at `engine_url`, which is stamped `assistant/1`."""
    config = GatewayConfig(engines=(engine_url,), api_keys=KEYS, max_model_len=1024)
    metrics, sink, users = GatewayMetrics(CollectorRegistry()), MemorySink(), UserHasher("pepper")
    store = SqliteResponseStore(folder / "responses.sqlite", ResponsesConfig(), timeout_s=5.0)
    async with aiohttp.ClientSession() as http:
        stamp = {"new_version": "assistant/1"}
        async with http.post(f"{engine_url}/update_weight_version", json=stamp) as response:
            assert response.status == 200
        engine = HttpEngine(engine_url, model="assistant", http=http, timeouts=config.timeouts)
        gateway = Gateway(
            config,
            policy="assistant",
            router=make_router(
                [engine], policy="assistant", config=config, registry=metrics.registry
            ),
            renderer=load_renderer("chatml", str(model_dir)),
            sink=sink,
            metrics=metrics,
            users=users,
        )
        feedback = FeedbackRecorder(
            sink=sink, users=users, metrics=metrics, max_recent=10, store_timeout_s=1
        )
        app = create_app(gateway, keyring=Keyring(KEYS), feedback=feedback, responses=store)
        async with listening(app) as url:
            yield Service(url, gateway, sink)
    await store.close()
