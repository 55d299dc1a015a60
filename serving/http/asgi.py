"""What all routes share: bounded bodies, errors in an envelope, callers that disconnect."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.encoding.json import read_json_text, to_json
from onlinerl.serving.gateway.answer import Answer
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.wire.errors import error_body

logger = logging.getLogger(__name__)

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]
Envelope = Callable[[RequestRefused | EngineFailed], dict[str, object]]
"""Makes a protocol's response body of an error."""


class GuardedRoute:
    """An ASGI endpoint that answers with its errors in a protocol's form; OpenAI's by default."""

    def __init__(self, endpoint: Endpoint, *, envelope: Envelope = error_body) -> None:
        self._endpoint = endpoint
        self._envelope = envelope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._endpoint(scope, receive, noting_send)
        except (RequestRefused, EngineFailed) as error:
            await self._fail(error, send)
        except ClientGone:
            return
        except Exception:
            logger.exception("a request failed", extra={"path": scope["path"]})
            if not started:
                await self._fail(RequestRefused("the gateway failed", 500), send)

    async def _fail(self, error: RequestRefused | EngineFailed, send: Send) -> None:
        with contextlib.suppress(OSError):  # the caller has disconnected
            await send_json(
                send, self._envelope(error), status=error.status, headers=_error_headers(error)
            )


class CountedApp:
    """Counts every answered request by route and status; unknown paths count as `other`."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and count the status of its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The router has stored the route that matched in the scope by now.
                route = getattr(scope.get("route"), "path", None)
                path = route if route in self._paths else "other"
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)


class ClientGone(Exception):
    """Raised when the caller closed the connection before its body was read."""


def json_response(
    body: Mapping[str, object], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response."""
    return Response(to_json(dict(body)), status, headers, media_type="application/json")


async def send_json(
    send: Send,
    body: Mapping[str, object],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a JSON response."""
    data = to_json(dict(body))
    fields = {
        "content-type": "application/json",
        "content-length": str(len(data)),
        **(headers or {}),
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def error_response(error: RequestRefused | EngineFailed) -> Response:
    """An error in OpenAI's envelope, with its own status."""
    return json_response(error_body(error), status=error.status, headers=_error_headers(error))


def _error_headers(error: RequestRefused | EngineFailed) -> dict[str, str]:
    default = {"retry-after": "1"} if error.status in (429, 503) else {}
    return default | (error.headers if isinstance(error, RequestRefused) else {})


async def read_json(scope: Scope, receive: Receive, *, config: GatewayConfig) -> object:
    """Read the body of a request as JSON.

    Raises:
        RequestRefused: 413 when it is larger than `limits.max_body_bytes`, 408 when it takes longer
            than `timeouts.receive_s`, 400 when it is not JSON or not Unicode text.
        ClientGone: when the caller disconnects.
    """
    max_bytes, timeout_s = config.limits.max_body_bytes, config.timeouts.receive_s
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(receive, max_bytes=max_bytes)
    except TimeoutError as error:
        why = f"the body did not come within {timeout_s} s"
        raise RequestRefused(why, 408, headers={"connection": "close"}) from error
    try:
        return read_json_text(body.decode())
    except ValueError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error


async def _read(receive: Receive, *, max_bytes: int) -> bytearray:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        more = message.get("more_body", False)
    return body


def _too_large(max_bytes: int) -> RequestRefused:
    return RequestRefused(f"the body is larger than {max_bytes} bytes", 413)


@contextlib.asynccontextmanager
async def leave_on_disconnect(answer: Answer, receive: Receive) -> AsyncIterator[None]:
    """Make the answer leave when the caller disconnects, or when the block raises."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except OSError:
        answer.leave()  # the caller has disconnected
    except BaseException:
        answer.leave()
        raise
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
