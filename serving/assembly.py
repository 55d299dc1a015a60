"""Puts the parts of a gateway together. It imports all of them, so only the process imports it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class GatewayParts:
    """Everything that an application is made of. The process opens and closes the parts."""

    config: GatewayConfig
    policy: str
    """Name of the policy."""
    renderer: Renderer
    keyring: Keyring
    users: UserHasher
    http: aiohttp.ClientSession
    """Connections to the engines."""
    spool: Spool
    shipper: Shipper
    responses: ResponseStore
    metrics: GatewayMetrics
    tracing: Tracing
    arms_key: str | None
    """Key of the hash that gives sessions to arms; see `make_router`."""
    arms: ArmsSource | None
    """Reads the decisions about arms; None serves the champion alone."""


def assemble(parts: GatewayParts) -> Starlette:
    """The application of a gateway over the engines of its configuration."""
    spool, shipper = parts.spool, parts.shipper
    return create_app(
        _make_gateway(parts),
        keyring=parts.keyring,
        feedback=_make_feedback(parts),
        responses=parts.responses,
        status=lambda: {
            "backlog_bytes": spool.backlog_bytes,
            "event_log": shipper.fault or "ok",
            "spool": spool.fault or "ok",
        },
    )


def _make_gateway(parts: GatewayParts) -> Gateway:
    config, policy = parts.config, parts.policy
    engines = [
        parts.tracing.engine(
            HttpEngine(url, model=policy, http=parts.http, timeouts=config.timeouts)
        )
        for url in config.engines
    ]
    router = make_router(
        engines,
        policy=policy,
        config=config,
        registry=parts.metrics.registry,
        key=parts.arms_key,
        arms=parts.arms,
    )
    return Gateway(
        config,
        policy=policy,
        router=router,
        renderer=parts.renderer,
        sink=parts.spool,
        metrics=parts.metrics,
        users=parts.users,
    )


def _make_feedback(parts: GatewayParts) -> FeedbackRecorder:
    return FeedbackRecorder(
        sink=parts.spool,
        users=parts.users,
        metrics=parts.metrics,
        max_recent=parts.config.limits.max_recent_feedback,
        store_timeout_s=parts.config.timeouts.store_s,
    )


@contextlib.asynccontextmanager
async def run_event_log(
    config: GatewayConfig,
    *,
    broker: BrokerConfig,
    folder: Path,
    stored: StoredOffsets,
    metrics: GatewayMetrics,
) -> AsyncIterator[tuple[Spool, Shipper]]:
    """Run spool and shipper; at the end everything is stored, and shipped if the log takes it."""
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
async def open_responses(config: GatewayConfig, path: Path) -> AsyncIterator[ResponseStore]:
    """Open the store of the responses protocol, and close it at the end."""
    store = SqliteResponseStore(path, config.responses, timeout_s=config.timeouts.store_s)
    try:
        yield store
    finally:
        await store.close()
