"""Stands before an engine that other machines can reach, and asks for the shared secret.

vLLM's administrative endpoints ask for no key, and its own key opens but a part of its paths. So
vLLM listens on loopback, and everything that comes from outside passes here, health and metrics
included. Nothing is interpreted: bytes go through as they come, in both directions.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from onlinerl.errors import ConfigError
from onlinerl.secret_names import ENGINE_SECRET, MIN_SECRET

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_DROPPED = frozenset(
    {
        # Of one connection only (RFC 9110, section 7.6.1).
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade",
        # The secret stays here, and each connection has a host of its own.
        "authorization", "host",
    }
)  # fmt: skip


def checked_secret(environment: Mapping[str, str]) -> str:
    """The shared secret.

    Raises:
        ConfigError: when there is none, or it is too short.
    """
    secret = environment.get(ENGINE_SECRET, "")
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"engine.host can be reached from other machines: set {ENGINE_SECRET} to a secret of "
            f"at least {MIN_SECRET} characters, here, for the gateway and for the deploy "
            "controller, or listen on 127.0.0.1"
        )
    return secret


class Guard:
    """A reverse proxy to one engine, for callers that know the secret.

    Args:
        upstream: Address of the engine, on loopback.
        secret: What callers send as `Authorization: Bearer`.
    """

    def __init__(self, upstream: str, *, secret: str) -> None:
        self._upstream = upstream
        self._digest = _digest(f"Bearer {secret}")
        self._http: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The server side; a body may be of any size, and is never held whole."""
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.cleanup_ctx.append(self._session)
        return app

    async def _session(self, _: web.Application) -> AsyncIterator[None]:
        # What an answer may take is known to who asked: a caller that gives up closes the stream.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=timeout,
            auto_decompress=False,
        ) as self._http:
            yield

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        given = _digest(request.headers.get("authorization", ""))
        if not hmac.compare_digest(given, self._digest):
            return _error(401, f"send the engine's secret ({ENGINE_SECRET}) as bearer token")
        if not request.raw_path.startswith("/"):
            # `GET @elsewhere/` would name another host once it is joined to the address.
            return _error(400, "the request target has to be a path")
        assert self._http is not None
        try:
            upstream = await self._http.request(
                request.method,
                # The raw path: what was escaped stays escaped.
                URL(self._upstream + request.raw_path, encoded=True),
                headers=_passed(request.headers),
                data=request.content if request.can_read_body else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            return _error(503, f"the engine behind the guard does not answer: {error}")
        async with upstream:
            return await _pass_back(request, upstream)


async def _pass_back(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=upstream.status, headers=_passed(upstream.headers))
    await response.prepare(request)
    try:
        async for piece in upstream.content.iter_any():
            await response.write(piece)
    except aiohttp.ClientError as error:
        logger.warning("the engine broke off an answer", extra={"error": repr(error)})
        if request.transport is not None:
            # An answer that ends in order would look whole.
            request.transport.abort()
    return response


def _passed(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in _DROPPED
    )


def _digest(text: str) -> bytes:
    """A hash of one length, so that comparing takes the same time for every header."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@contextlib.contextmanager
def guarding(host: str, port: int, *, upstream: str, secret: str) -> Iterator[int]:
    """A guard on `host` and `port`, in a thread of its own; the port that it got.

    Raises:
        ConfigError: when the address cannot be used.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="guard", daemon=True)
    thread.start()
    runner: web.AppRunner | None = None
    try:
        starting = asyncio.run_coroutine_threadsafe(
            _started(host, port, Guard(upstream, secret=secret)), loop
        )
        try:
            runner = starting.result(_START_TIMEOUT_S)
        except OSError as error:
            raise ConfigError(
                f"[engine] cannot listen on {host}:{port} ({error.strerror}): set another address"
            ) from error
        bound: int = runner.addresses[0][1]
        logger.info("guard listens", extra={"address": f"{host}:{bound}"})
        yield bound
    finally:
        if runner is not None:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(_START_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_START_TIMEOUT_S)
        loop.close()


async def _started(host: str, port: int, guard: Guard) -> web.AppRunner:
    # A caller that goes away ends its handler, which closes the call to the engine.
    runner = web.AppRunner(
        guard.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner
