"""The gateway process: puts the parts together, serves until SIGTERM or SIGINT, leaves in order."""

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
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onlinerl.process import logs
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.secret_names import ENGINE_SECRET, USER_HASH_KEY
from onlinerl.serving.config import GatewayConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from onlinerl.serving.observability.tracing import Tracing
    from onlinerl.serving.routing.arms_reader import ArmsSource
    from onlinerl.serving.spool.confirmation import StoredOffsets
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

_GIVE_WAY_S = 0.001
"""After this a busy thread lets the one that serves run."""


def run_gateway(settings: "Settings") -> int:
    """Serve `settings.gateway` until told to stop; 0 after a clean stop.

    Raises:
        ConfigError: without API keys or tokenizer, or when the port is taken.
        LeaseHeld: when another gateway uses the spool.
        SystemExit: from uvicorn, with a code that is not 0, when the gateway failed to start.
    """
    import uvloop

    from onlinerl.rollout_store.tables.delta_store import DeltaStore
    from onlinerl.serving.routing.arms_reader import arms_in
    from onlinerl.serving.spool.confirmation import stored_in

    logs.keep_content_out()
    gateway = settings.gateway
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    spool_dir = Path(gateway.spool.dir) if gateway.spool.dir else settings.folder("spool")
    serving = serve_gateway(
        gateway,
        broker=settings.broker,
        policy=settings.policy.name,
        tokenizer=gateway.tokenizer or settings.policy.base_model,
        spool_dir=spool_dir,
        keys_path=Path(gateway.keys_file or settings.folder("keys.json")),
        responses_path=Path(gateway.responses.path or settings.folder("responses.sqlite")),
        environment=os.environ,
        arms=arms_in(store),
        stored=stored_in(store),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)
    return 0


async def serve_gateway(
    config: GatewayConfig,
    *,
    broker: BrokerConfig,
    policy: str,
    tokenizer: str,
    spool_dir: Path,
    keys_path: Path,
    responses_path: Path,
    environment: Mapping[str, str],
    stored: "StoredOffsets",
    arms: "ArmsSource | None" = None,
) -> None:
    """Serve until a signal. Requests end first, then the spool is shipped, then it returns.

    Args:
        config: what was configured.
        broker: the event log.
        policy: name of the policy.
        tokenizer: folder with tokenizer and chat template.
        spool_dir: folder of the spool.
        keys_path: file of `onlinerl keys`; looked at while serving.
        responses_path: file of stored responses.
        environment: holds more keys, the key under which users are hashed, and the secret that
            guards engines.
        stored: how far the tables are.
        arms: what the deploy controller decided; None serves the champion alone.
    """
    from prometheus_client import REGISTRY

    from onlinerl.rollout_store.user_hash import UserHasher
    from onlinerl.serving.access.auth import Keyring
    from onlinerl.serving.access.key_file import keys_of_environment, load_keys
    from onlinerl.serving.access.keys_watcher import KeysWatcher
    from onlinerl.serving.assembly import assemble, event_log, stored_responses
    from onlinerl.serving.engine_client.http import engine_session
    from onlinerl.serving.http.listening import listening, tls_context
    from onlinerl.serving.observability.metrics import GatewayMetrics
    from onlinerl.serving.observability.tracing import open_tracing
    from onlinerl.serving.rendering.loading import load_renderer

    # What can be wrong in the configuration is found before anything is started.
    fixed_keys = (*config.api_keys, *keys_of_environment(environment))
    keyring = Keyring([*fixed_keys, *load_keys(keys_path)])
    tls = tls_context(config.tls)
    renderer = load_renderer(
        config.renderer,
        tokenizer,
        # Called while answers are read, long after `metrics` below was made.
        on_parse_failure=lambda: metrics.unparsed_calls.inc(),
    )
    users = UserHasher(environment.get(USER_HASH_KEY))
    if USER_HASH_KEY not in environment:
        logger.warning("user ids are not logged: set %s to log their hash", USER_HASH_KEY)
    with listening(config.host, config.port) as listener:
        metrics = GatewayMetrics(REGISTRY)
        watcher = KeysWatcher(
            keys_path, keyring, others=fixed_keys, poll_s=config.keys_poll_s, metrics=metrics
        )
        async with (
            engine_session(secret=environment.get(ENGINE_SECRET)) as http,
            event_log(config, broker=broker, folder=spool_dir, stored=stored, metrics=metrics) as (
                spool,
                shipper,
            ),
            running(watcher.watch()),
            stored_responses(config, responses_path) as responses,
        ):
            tracing = open_tracing(config.tracing)
            app = assemble(
                config,
                policy=policy,
                renderer=renderer,
                keyring=keyring,
                users=users,
                http=http,
                spool=spool,
                shipper=shipper,
                responses=responses,
                metrics=metrics,
                tracing=tracing,
                arms_key=environment.get(USER_HASH_KEY),
                arms=arms,
            )
            with _signals_end_quietly():
                await _serve(app, config, listener=listener, tls=tls, tracing=tracing)
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
    from onlinerl.serving.http.listening import with_cors

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
    """Little time for the collector and for the threads that store and ship.

    What is loaded by now stays as long as the process, and requests leave few cycles behind.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    sys.setswitchinterval(_GIVE_WAY_S)


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While inside, `work` runs; it is cancelled at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


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
