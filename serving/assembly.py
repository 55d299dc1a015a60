"""The parts of a gateway, put together. Imports all of them, so only the process imports this."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from starlette.applications import Starlette

from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.api.app import create_app
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.engine_client.http import HttpEngine
from onlinerl.serving.feedback.recorder import FeedbackRecorder
from onlinerl.serving.gateway.answering import Gateway
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.observability.tracing import Tracing
from onlinerl.serving.protocols.responses.sqlite_store import SqliteResponseStore
from onlinerl.serving.protocols.responses.store import ResponseStore
from onlinerl.serving.rendering.protocol import Renderer
from onlinerl.serving.routing.arms_reader import ArmsSource
from onlinerl.serving.routing.assembly import make_router
from onlinerl.serving.spool.confirmation import Confirmation, StoredOffsets
from onlinerl.serving.spool.log_writer import KafkaWriter
from onlinerl.serving.spool.queue import Spool
from onlinerl.serving.spool.shipper import Shipper


def assemble(
    config: GatewayConfig,
    *,
    policy: str,
    renderer: Renderer,
    keyring: Keyring,
    users: UserHasher,
    http: aiohttp.ClientSession,
    spool: Spool,
    shipper: Shipper,
    responses: ResponseStore,
    metrics: GatewayMetrics,
    tracing: Tracing,
    arms_key: str | None,
    arms: ArmsSource | None,
) -> Starlette:
    """The application of a gateway over the engines of its configuration."""
    gateway = Gateway(
        config,
        policy=policy,
        router=make_router(
            [
                tracing.engine(HttpEngine(url, model=policy, http=http, timeouts=config.timeouts))
                for url in config.engines
            ],
            policy=policy,
            config=config,
            registry=metrics.registry,
            key=arms_key,
            arms=arms,
        ),
        renderer=renderer,
        sink=spool,
        metrics=metrics,
        users=users,
    )
    feedback = FeedbackRecorder(
        sink=spool,
        users=users,
        metrics=metrics,
        max_recent=config.limits.max_recent_feedback,
        store_timeout_s=config.timeouts.store_s,
    )
    return create_app(
        gateway,
        keyring=keyring,
        feedback=feedback,
        responses=responses,
        status=lambda: {
            "backlog_bytes": spool.backlog_bytes,
            "event_log": shipper.fault or "ok",
            "spool": spool.fault or "ok",
        },
    )


@contextlib.asynccontextmanager
async def event_log(
    config: GatewayConfig,
    *,
    broker: BrokerConfig,
    folder: Path,
    stored: StoredOffsets,
    metrics: GatewayMetrics,
) -> AsyncIterator[tuple[Spool, Shipper]]:
    """Spool and shipper; at the end everything is stored, and shipped if the log takes it."""
    spool = Spool(folder, config.spool, metrics=metrics)
    shipper = Shipper(
        spool,
        connect=lambda: KafkaWriter(broker, config.spool),
        config=config.spool,
        metrics=metrics,
    )
    confirmation = Confirmation(spool, stored, every_s=config.spool.confirm_s, metrics=metrics)
    shipper.start()
    confirmation.start()
    try:
        yield spool, shipper
    finally:
        confirmation.close()
        await asyncio.to_thread(shipper.close, drain_s=config.timeouts.shutdown_s)
        await asyncio.to_thread(spool.close, timeout_s=config.timeouts.shutdown_s)


@contextlib.asynccontextmanager
async def stored_responses(config: GatewayConfig, path: Path) -> AsyncIterator[ResponseStore]:
    """What the responses protocol keeps; closed at the end."""
    store = SqliteResponseStore(path, config.responses, timeout_s=config.timeouts.store_s)
    try:
        yield store
    finally:
        await store.close()
