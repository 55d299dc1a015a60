"""The HTTP surface. Pure ASGI: handlers see at once when a caller goes away.

Only what is listed in `create_app` can be reached; nothing is passed through to an engine.
"""

import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from onlinerl import __version__
from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.answer import Answer
from onlinerl.serving.auth import Keyring, narrowed
from onlinerl.serving.chat import parse_chat
from onlinerl.serving.chat_answer import (
    completion_body,
    delta_chunk,
    error_body,
    opening_chunk,
    to_json,
    usage_chunk,
)
from onlinerl.serving.exchange import Exchange
from onlinerl.serving.feedback import FeedbackDesk
from onlinerl.serving.gateway import Gateway, Terms
from onlinerl.serving.http import (
    CountedApp,
    GuardedRoute,
    error_response,
    json_response,
    leaving_when_gone,
    read_json,
)
from onlinerl.serving.sse import DONE, event

_SESSION_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def create_app(
    gateway: Gateway,
    *,
    keyring: Keyring,
    feedback: FeedbackDesk,
    status: Callable[[], dict[str, Any]] = dict,
) -> Starlette:
    """The gateway's ASGI application; its lifespan starts and closes `gateway`.

    Args:
        gateway: answers chat requests.
        keyring: who may call.
        feedback: takes feedback.
        status: what `/health/ready` tells beside the replicas, e.g. the spool's backlog.
    """
    routes: dict[str, tuple[str, Callable[..., Any]]] = {
        "/v1/chat/completions": ("POST", GuardedRoute(ChatRoute(gateway, keyring))),
        "/v1/feedback": ("POST", GuardedRoute(FeedbackRoute(gateway, keyring, feedback))),
        "/v1/models": ("GET", GuardedRoute(ModelsRoute(gateway, keyring))),
        "/health/live": ("GET", _live),
        "/health/ready": ("GET", _ready(gateway, status)),
        "/metrics": ("GET", _metrics(gateway)),
        "/version": ("GET", _version(gateway)),
    }

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    return Starlette(
        routes=[
            Route(path, endpoint, methods=[method]) for path, (method, endpoint) in routes.items()
        ],
        middleware=[Middleware(CountedApp, metrics=gateway.metrics, paths=frozenset(routes))],
        exception_handlers={404: _no_route, 405: _no_route},
        lifespan=lifespan,
    )


class ChatRoute:
    """POST /v1/chat/completions."""

    def __init__(self, gateway: Gateway, keyring: Keyring) -> None:
        self._gateway = gateway
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one chat request, whole or streamed."""
        headers = Headers(scope=scope)
        caller = self._keyring.identify(headers.get("authorization"))
        config = self._gateway.config
        body = await read_json(scope, receive, max_bytes=config.limits.max_body_bytes)
        chat = parse_chat(body, defaults=config.sampling, max_choices=config.limits.max_choices)
        exchange, answer = self._gateway.begin(chat, caller=caller, terms=_terms(headers))
        async with leaving_when_gone(answer, receive):
            reply = _stream if chat.stream else _whole
            await reply(exchange, answer, scope=scope, receive=receive, send=send)


async def _whole(
    exchange: Exchange, answer: Answer, *, scope: Scope, receive: Receive, send: Send
) -> None:
    async for _ in answer.deltas():
        pass
    if not answer.left:
        body = completion_body(exchange, answer.choices)
        await json_response(body, headers=_id_headers(exchange))(scope, receive, send)


async def _stream(
    exchange: Exchange, answer: Answer, *, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send events as deltas come; the status waits for the first, so an early error keeps it."""

    async def send_body(data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    opened = False
    try:
        async for delta in answer.deltas():
            chunks = [delta_chunk(exchange, delta)]
            if not opened:
                opened = True
                await send(_stream_start(exchange))
                chunks = [*_openings(exchange), *chunks]
            await send_body(b"".join(event(to_json(chunk)) for chunk in chunks))
    except EngineFailed as failure:
        if answer.left:
            return
        if not opened:
            raise
        body = error_body(failure.message, status=failure.status, param=None, code="engine_failed")
        await send_body(event(to_json(body)), more=False)
        return
    if answer.left:
        return
    tail = event(DONE)
    if exchange.chat.include_usage:
        tail = event(to_json(usage_chunk(exchange, answer.choices))) + tail
    await send_body(tail, more=False)


def _openings(exchange: Exchange) -> list[dict[str, Any]]:
    return [
        opening_chunk(exchange, choice_index=index) for index in range(exchange.chat.num_choices)
    ]


def _stream_start(exchange: Exchange) -> dict[str, Any]:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        # Proxies that buffer would hold the stream back.
        "x-accel-buffering": "no",
        **_id_headers(exchange),
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


def _id_headers(exchange: Exchange) -> dict[str, str]:
    return {
        "x-onlinerl-interaction-id": exchange.interaction_id,
        "x-onlinerl-session-id": exchange.lineage.session_id,
        "x-onlinerl-policy-version": exchange.policy_version,
    }


def _terms(headers: Headers) -> Terms:
    session_id = headers.get("x-onlinerl-session-id")
    if session_id is not None and _SESSION_ID.fullmatch(session_id) is None:
        raise RequestRefused(
            "x-onlinerl-session-id: give 1 to 128 letters, digits or any of _ . : -"
        )
    return Terms(session_id=session_id, consent=headers.get("x-onlinerl-consent"))


class FeedbackRoute:
    """POST /v1/feedback."""

    def __init__(self, gateway: Gateway, keyring: Keyring, feedback: FeedbackDesk) -> None:
        self._gateway = gateway
        self._keyring = keyring
        self._feedback = feedback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take one feedback; 200 also for an identical retry."""
        headers = Headers(scope=scope)
        caller = self._keyring.identify(headers.get("authorization"))
        consent = narrowed(caller.consent, headers.get("x-onlinerl-consent"))
        limit = self._gateway.config.limits.max_body_bytes
        body = await read_json(scope, receive, max_bytes=limit)
        feedback_id = await self._feedback.take(body, caller=caller, consent=consent)
        answer = {"object": "feedback", "feedback_id": feedback_id}
        await json_response(answer)(scope, receive, send)


class ModelsRoute:
    """GET /v1/models."""

    def __init__(self, gateway: Gateway, keyring: Keyring) -> None:
        self._gateway = gateway
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The one policy that this gateway serves."""
        self._keyring.identify(Headers(scope=scope).get("authorization"))
        model = {
            "id": self._gateway.policy,
            "object": "model",
            "created": 0,
            "owned_by": "onlinerl",
            "max_model_len": self._gateway.config.max_model_len,
        }
        await json_response({"object": "list", "data": [model]})(scope, receive, send)


async def _live(_: Request) -> Response:
    return PlainTextResponse("live")


def _ready(gateway: Gateway, status: Callable[[], dict[str, Any]]) -> Callable[[Request], Any]:
    async def ready(_: Request) -> Response:
        fault = gateway.pool.fault()
        body = {
            "ready": fault is None,
            "reason": fault,
            "policy_versions": gateway.pool.versions(),
            **status(),
        }
        return json_response(body, status=200 if fault is None else 503)

    return ready


def _metrics(gateway: Gateway) -> Callable[[Request], Any]:
    async def metrics(_: Request) -> Response:
        gateway.metrics.replicas.set(
            sum(replica.version is not None for replica in gateway.pool.replicas)
        )
        text = generate_latest(gateway.metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return metrics


def _version(gateway: Gateway) -> Callable[[Request], Any]:
    async def version(_: Request) -> Response:
        return json_response(
            {
                "version": __version__,
                "policy": gateway.policy,
                "policy_versions": gateway.pool.versions(),
            }
        )

    return version


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return error_response(
        RequestRefused(f"{request.method} {request.url.path} is not served here", status)
    )
