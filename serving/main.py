"""The gateway process: puts the parts together, serves until SIGTERM or SIGINT, stops in order."""

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onlinerl.process import logs
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.secret_names import ENGINE_SECRET, USER_HASH_KEY
from onlinerl.serving.config import GatewayConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from onlinerl.rollout_store.user_hash import UserHasher
    from onlinerl.serving.access.auth import Keyring
    from onlinerl.serving.config import ApiKeyConfig
    from onlinerl.serving.observability.metrics import GatewayMetrics
    from onlinerl.serving.observability.tracing import Tracing
    from onlinerl.serving.rendering.protocol import Renderer
    from onlinerl.serving.routing.arms_reader import ArmsSource
    from onlinerl.serving.spool.confirmation import StoredOffsets
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.001
"""Longest time that a busy thread runs before the thread that serves gets its turn."""


@dataclass(frozen=True, kw_only=True)
class GatewayProcess:
    """What a gateway process is started with."""

    config: GatewayConfig
    broker: BrokerConfig
    policy: str
    """Name of the policy."""
    tokenizer: str
    """Folder with tokenizer and chat template."""
    spool_dir: Path
    keys_path: Path
    """File of `onlinerl keys`; watched while the gateway serves."""
    responses_path: Path
    """SQLite file of stored responses."""
    environment: Mapping[str, str]
    """Holds further API keys, the key that user ids are hashed with, and the secret of engines."""
    stored: "StoredOffsets"
    """Reads how far the tables are."""
    arms: "ArmsSource | None" = None
    """Reads what the deploy controller decided; None serves the champion alone."""


def run_gateway(settings: "Settings") -> int:
    """Serve `settings.gateway` until told to stop; 0 after a clean stop.

    Raises:
        ConfigError: without API keys or tokenizer, or when the port is taken.
        LeaseHeld: when another gateway uses the spool.
        SystemExit: from uvicorn, with a code other than 0, when the gateway failed to start.
    """
    import uvloop

    from onlinerl.rollout_store.tables.delta_store import DeltaStore
    from onlinerl.serving.routing.arms_reader import arms_in
    from onlinerl.serving.spool.confirmation import stored_in

    logs.keep_content_out()
    gateway = settings.gateway
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    process = GatewayProcess(
        config=gateway,
        broker=settings.broker,
        policy=settings.policy.name,
        tokenizer=gateway.tokenizer or settings.policy.base_model,
        spool_dir=Path(gateway.spool.dir) if gateway.spool.dir else settings.folder("spool"),
        keys_path=Path(gateway.keys_file or settings.folder("keys.json")),
        responses_path=Path(gateway.responses.path or settings.folder("responses.sqlite")),
        environment=os.environ,
        arms=arms_in(store),
        stored=stored_in(store),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_gateway(process))
    return 0


async def serve_gateway(process: GatewayProcess) -> None:
    """Serve until a signal. Then requests end first, the spool is shipped, and it returns.

    Raises:
        ConfigError: before anything is started, when the configuration cannot be served.
    """
    from onlinerl.rollout_store.user_hash import UserHasher
    from onlinerl.serving.access.auth import Keyring
    from onlinerl.serving.access.key_file import keys_of_environment, load_keys
    from onlinerl.serving.http.listener import open_listener, tls_context
    from onlinerl.serving.observability.metrics import GatewayMetrics, process_registry
    from onlinerl.serving.rendering.loading import load_renderer

    config, environment = process.config, process.environment
    metrics = GatewayMetrics(process_registry())
    fixed_keys = (*config.api_keys, *keys_of_environment(environment))
    parts = _StartupParts(
        fixed_keys=fixed_keys,
        keyring=Keyring([*fixed_keys, *load_keys(process.keys_path)]),
        tls=tls_context(config.tls),
        renderer=load_renderer(
            config.renderer,
            process.tokenizer,
            on_parse_failure=metrics.answers.unparsed_calls.inc,
        ),
        users=UserHasher(environment.get(USER_HASH_KEY)),
        metrics=metrics,
    )
    if USER_HASH_KEY not in environment:
        logger.warning("user ids are not logged: set %s to log their hash", USER_HASH_KEY)
    with open_listener(config.host, config.port) as listener:
        await _run(process, parts, listener=listener)


@dataclass(frozen=True, kw_only=True)
class _StartupParts:
    """What was made of the configuration before anything is started."""

    fixed_keys: "Sequence[ApiKeyConfig]"
    """API keys that the keys file does not hold."""
    keyring: "Keyring"
    tls: ssl.SSLContext | None
    renderer: "Renderer"
    users: "UserHasher"
    metrics: "GatewayMetrics"


async def _run(process: GatewayProcess, parts: _StartupParts, *, listener: socket.socket) -> None:
    """Open the other parts, serve, and close them in order."""
    from onlinerl.serving.access.keys_watcher import KeysWatcher
    from onlinerl.serving.assembly import GatewayParts, assemble, open_responses, run_event_log
    from onlinerl.serving.engine_client.http import engine_session
    from onlinerl.serving.observability.tracing import open_tracing

    config, environment = process.config, process.environment
    metrics = parts.metrics
    watcher = KeysWatcher(
        process.keys_path,
        parts.keyring,
        others=parts.fixed_keys,
        poll_s=config.keys_poll_s,
        metrics=metrics,
    )
    async with (
        engine_session(secret=environment.get(ENGINE_SECRET)) as http,
        run_event_log(
            config,
            broker=process.broker,
            folder=process.spool_dir,
            stored=process.stored,
            metrics=metrics,
        ) as (spool, shipper),
        run_in_background(watcher.watch()),
        open_responses(config, process.responses_path) as responses,
    ):
        tracing = open_tracing(config.tracing)
        app = assemble(
            GatewayParts(
                config=config,
                policy=process.policy,
                renderer=parts.renderer,
                keyring=parts.keyring,
                users=parts.users,
                http=http,
                spool=spool,
                shipper=shipper,
                responses=responses,
                metrics=metrics,
                tracing=tracing,
                arms_key=environment.get(USER_HASH_KEY),
                arms=process.arms,
            )
        )
        with _ignore_signals():
            await _serve(app, config, listener=listener, tls=parts.tls, tracing=tracing)
        await asyncio.to_thread(tracing.close, timeout_s=config.timeouts.shutdown_s)


async def _serve(
    app: "ASGIApp",
    config: GatewayConfig,
    *,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    tracing: "Tracing",
) -> None:
    import uvicorn

    from onlinerl.serving.http.bounded_http import bounded_http
    from onlinerl.serving.http.drain import Drain, DrainingServer, ReadinessGate
    from onlinerl.serving.http.listener import with_cors

    drain = Drain()
    server = DrainingServer(
        uvicorn.Config(
            tracing.app(with_cors(ReadinessGate(app, drain), config.cors)),
            access_log=False,
            log_config=None,
            lifespan="on",
            server_header=False,
            proxy_headers=False,
            http=bounded_http(
                max_head_bytes=config.limits.max_head_bytes, timeout_s=config.timeouts.receive_s
            ),
            ssl_context_factory=None if tls is None else lambda *_: tls,
            timeout_graceful_shutdown=math.ceil(config.timeouts.shutdown_s),
        ),
        drain=drain,
        grace_s=config.timeouts.ready_grace_s,
    )
    _put_requests_first()
    await server.serve(sockets=[listener])


def _put_requests_first() -> None:
    """Give the garbage collector and the threads that store and ship little time.

    Everything that is loaded now lives as long as the process, and requests leave few cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


@contextlib.asynccontextmanager
async def run_in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` until the block ends, then cancel it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.contextmanager
def _ignore_signals() -> Iterator[None]:
    """Let the process exit with 0 although uvicorn raises the signal that stopped it once more."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
