"""What the routes share: bodies within a bound, errors in OpenAI's envelope, who has gone away."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.answer import Answer
from onlinerl.serving.chat_answer import error_body, to_json
from onlinerl.serving.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


class GuardedRoute:
    """An ASGI endpoint whose errors become OpenAI's envelope."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

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
            await error_response(error)(scope, receive, send)
        except ClientGone:
            return
        except Exception:
            logger.exception("a request failed", extra={"path": scope["path"]})
            if not started:
                failed = RequestRefused("the gateway failed", 500)
                await error_response(failed)(scope, receive, send)


class CountedApp:
    """Counts every answered request by path and status; paths that do not exist count as one."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, reading the status as it goes by."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)


class ClientGone(Exception):
    """The caller closed the connection before its body was read."""


def json_response(
    body: Mapping[str, object], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON answer."""
    return Response(to_json(dict(body)), status, headers, media_type="application/json")


def error_response(error: RequestRefused | EngineFailed) -> Response:
    """An error in OpenAI's envelope, with its own status."""
    param = error.param if isinstance(error, RequestRefused) else None
    code = error.code if isinstance(error, RequestRefused) else "engine_failed"
    body = error_body(error.message, status=error.status, param=param, code=code)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return json_response(body, status=error.status, headers=headers)


async def read_json(scope: Scope, receive: Receive, *, max_bytes: int) -> object:
    """The body of a request, as JSON.

    Raises:
        RequestRefused: 413 when it is larger than `max_bytes`, 400 when it is not JSON or holds
            what is no Unicode text.
    """
    too_large = RequestRefused(f"the body is larger than {max_bytes} bytes", 413)
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large
        more = message.get("more_body", False)
    try:
        value = json.loads(bytes(body), parse_constant=_refuse_constant)
        # Lone surrogates are JSON and no text: nothing that is sent or logged can hold them.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


@contextlib.asynccontextmanager
async def leaving_when_gone(answer: Answer, receive: Receive) -> AsyncIterator[None]:
    """While inside, a caller that goes away makes the answer leave; so does an error."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except OSError:
        answer.leave()  # nobody takes what is sent
    except BaseException:
        answer.leave()
        raise
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
