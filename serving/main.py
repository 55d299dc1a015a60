"""The gateway process: puts the parts together, serves until SIGTERM or SIGINT, leaves in order."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.serving.config import GatewayConfig

if TYPE_CHECKING:
    import aiohttp
    from starlette.applications import Starlette

    from onlinerl.config import Settings
    from onlinerl.serving.auth import Keyring, UserHasher
    from onlinerl.serving.metrics import GatewayMetrics
    from onlinerl.serving.renderer import Renderer
    from onlinerl.serving.shipper import Shipper
    from onlinerl.serving.spool import Spool

logger = logging.getLogger(__name__)

USER_HASH_KEY = "ONLINERL_USER_HASH_KEY"
"""Environment variable with the key under which user ids are hashed."""


def run_gateway(settings: "Settings") -> int:
    """Serve `settings.gateway` until told to stop; 0 after a clean stop.

    Raises:
        ConfigError: without API keys or tokenizer, or when the port is taken.
        LeaseHeld: when another gateway uses the spool.
        SystemExit: from uvicorn, with a code that is not 0, when the gateway failed to start.
    """
    gateway = settings.gateway
    spool_dir = Path(gateway.spool.dir) if gateway.spool.dir else settings.folder("spool")
    asyncio.run(
        serve_gateway(
            gateway,
            broker=settings.broker,
            policy=settings.policy.name,
            tokenizer=gateway.tokenizer or settings.policy.base_model,
            spool_dir=spool_dir,
            user_hash_key=os.environ.get(USER_HASH_KEY),
        )
    )
    return 0


async def serve_gateway(
    config: GatewayConfig,
    *,
    broker: BrokerConfig,
    policy: str,
    tokenizer: str,
    spool_dir: Path,
    user_hash_key: str | None,
) -> None:
    """Serve until a signal. Requests end first, then the spool is shipped, then it returns."""
    import aiohttp
    import uvicorn
    from prometheus_client import REGISTRY

    from onlinerl.serving.auth import Keyring, UserHasher
    from onlinerl.serving.chat_template import load_model_text
    from onlinerl.serving.metrics import GatewayMetrics
    from onlinerl.serving.renderer import TemplateRenderer

    # What can be wrong in the configuration is found before anything is started.
    keyring = Keyring(config.api_keys)
    renderer = TemplateRenderer(load_model_text(tokenizer))
    if user_hash_key is None:
        logger.warning("user ids are not logged: set %s to log their hash", USER_HASH_KEY)
    with _listen(config.host, config.port) as listener:
        metrics = GatewayMetrics(REGISTRY)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
            _event_log(config, broker=broker, folder=spool_dir, metrics=metrics) as (
                spool,
                shipper,
            ),
        ):
            app = _assemble(
                config,
                policy=policy,
                renderer=renderer,
                keyring=keyring,
                users=UserHasher(user_hash_key),
                http=http,
                spool=spool,
                shipper=shipper,
                metrics=metrics,
            )
            server = uvicorn.Server(
                uvicorn.Config(
                    app,
                    access_log=False,
                    log_config=None,
                    lifespan="on",
                    server_header=False,
                    timeout_graceful_shutdown=max(int(config.timeouts.shutdown_s), 1),
                )
            )
            with _signals_end_quietly():
                await server.serve(sockets=[listener])


def _assemble(
    config: GatewayConfig,
    *,
    policy: str,
    renderer: "Renderer",
    keyring: "Keyring",
    users: "UserHasher",
    http: "aiohttp.ClientSession",
    spool: "Spool",
    shipper: "Shipper",
    metrics: "GatewayMetrics",
) -> "Starlette":
    from onlinerl.serving.app import create_app
    from onlinerl.serving.engine_client import HttpEngine
    from onlinerl.serving.feedback import FeedbackDesk
    from onlinerl.serving.gateway import Gateway

    gateway = Gateway(
        config,
        policy=policy,
        engines=[
            HttpEngine(url, model=policy, http=http, timeouts=config.timeouts)
            for url in config.engines
        ],
        renderer=renderer,
        sink=spool,
        metrics=metrics,
        users=users,
    )
    feedback = FeedbackDesk(
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
        status=lambda: {"backlog_bytes": spool.backlog_bytes, "event_log": shipper.fault or "ok"},
    )


@contextlib.asynccontextmanager
async def _event_log(
    config: GatewayConfig, *, broker: BrokerConfig, folder: Path, metrics: "GatewayMetrics"
) -> "AsyncIterator[tuple[Spool, Shipper]]":
    """Spool and shipper; at the end everything is stored, and shipped if the log takes it."""
    from onlinerl.serving.log_writer import KafkaWriter
    from onlinerl.serving.shipper import Shipper
    from onlinerl.serving.spool import Spool

    spool = Spool(folder, config.spool, metrics=metrics)
    shipper = Shipper(
        spool,
        connect=lambda: KafkaWriter(broker, config.spool),
        config=config.spool,
        metrics=metrics,
    )
    shipper.start()
    try:
        yield spool, shipper
    finally:
        await asyncio.to_thread(shipper.close, drain_s=config.timeouts.shutdown_s)
        await asyncio.to_thread(spool.close, timeout_s=config.timeouts.shutdown_s)


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"[gateway] cannot listen on {host}:{port} ({error.strerror}): set another port"
            ) from error
        logger.info("gateway listens", extra={"address": listener.getsockname()[:2]})
        yield listener


@contextlib.contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Uvicorn raises the signal that stopped it once more; here the process then exits with 0."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
