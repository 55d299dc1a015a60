"""The HTTP surface. Pure ASGI: handlers see at once when a caller goes away.

Only what is listed in `create_app` can be reached; nothing is passed through to an engine.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
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
from onlinerl.errors import RequestRefused
from onlinerl.serving.access.admission import Admission
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.api.openapi import openapi_document
from onlinerl.serving.encoding.json import to_json
from onlinerl.serving.feedback.desk import FeedbackDesk
from onlinerl.serving.feedback.route import FeedbackRoute
from onlinerl.serving.gateway.answering import Gateway
from onlinerl.serving.http.asgi import (
    CountedApp,
    Endpoint,
    GuardedRoute,
    error_response,
    json_response,
)
from onlinerl.serving.http.idempotency import Idempotency
from onlinerl.serving.http.protocol_route import EntryChecks, WireRoute
from onlinerl.serving.protocols.chat.protocol import ChatWire
from onlinerl.serving.protocols.chat.text_completions import CompletionsWire
from onlinerl.serving.protocols.messages.count_tokens import CountTokensRoute
from onlinerl.serving.protocols.messages.protocol import MessagesWire
from onlinerl.serving.protocols.messages.protocol import error_body as anthropic_error
from onlinerl.serving.protocols.responses.protocol import ResponsesWire
from onlinerl.serving.protocols.responses.store import ResponseStore
from onlinerl.serving.protocols.responses.stored_routes import InputItemsRoute, StoredResponseRoute
from onlinerl.serving.wire.protocol import Wire


def create_app(
    gateway: Gateway,
    *,
    keyring: Keyring,
    feedback: FeedbackDesk,
    status: Callable[[], dict[str, Any]] = dict,
    wires: Mapping[str, Wire] | None = None,
    endpoints: Mapping[str, tuple[str, Endpoint]] | None = None,
    responses: ResponseStore | None = None,
) -> Starlette:
    """The gateway's ASGI application; its lifespan starts and closes `gateway`.

    Args:
        gateway: answers requests.
        keyring: who may call.
        feedback: takes feedback.
        status: what `/health/ready` tells beside the replicas, e.g. the spool's backlog.
        wires: protocols beside OpenAI's chat completions and completions, by path.
        endpoints: more routes, by path, each with its methods; they answer their own errors.
        responses: what the responses protocol keeps; None does not serve that protocol.
    """
    config, metrics = gateway.config, gateway.metrics
    checks = EntryChecks(
        keyring=keyring,
        admission=Admission(config.limits, metrics=metrics),
        idempotency=Idempotency(config.idempotency, metrics=metrics),
    )
    spoken: dict[str, Wire] = {
        "/v1/chat/completions": ChatWire(),
        "/v1/completions": CompletionsWire(),
        "/v1/messages": MessagesWire(),
        **(wires or {}),
    }
    if responses is not None:
        spoken["/v1/responses"] = ResponsesWire(responses)
    routes: dict[str, tuple[str, Callable[..., Any]]] = {
        **{
            path: (
                "POST",
                GuardedRoute(WireRoute(wire, gateway=gateway, checks=checks), envelope=wire.error),
            )
            for path, wire in spoken.items()
        },
        **(endpoints or {}),
        **_stored_responses(responses, keyring=keyring),
        "/v1/messages/count_tokens": (
            "POST",
            GuardedRoute(CountTokensRoute(gateway, checks), envelope=anthropic_error),
        ),
        "/v1/feedback": (
            "POST",
            GuardedRoute(FeedbackRoute(feedback, checks, config=config)),
        ),
        "/v1/models": ("GET", GuardedRoute(ModelsRoute(gateway, keyring))),
        "/health/live": ("GET", _live),
        "/health/ready": ("GET", _ready(gateway, status)),
        "/metrics": ("GET", _metrics(gateway)),
        "/version": ("GET", _version(gateway)),
        "/openapi.json": (
            "GET",
            _fixed(openapi_document(policy=gateway.policy, with_responses=responses is not None)),
        ),
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
            Route(path, endpoint, methods=methods.split())
            for path, (methods, endpoint) in routes.items()
        ],
        middleware=[Middleware(CountedApp, metrics=metrics, paths=frozenset(routes))],
        exception_handlers={404: _no_route, 405: _no_route},
        lifespan=lifespan,
    )


def _stored_responses(
    store: ResponseStore | None, *, keyring: Keyring
) -> dict[str, tuple[str, Callable[..., Any]]]:
    if store is None:
        return {}
    return {
        "/v1/responses/{response_id}": (
            "GET DELETE",
            GuardedRoute(StoredResponseRoute(store, keyring)),
        ),
        "/v1/responses/{response_id}/input_items": (
            "GET",
            GuardedRoute(InputItemsRoute(store, keyring)),
        ),
    }


class ModelsRoute:
    """GET /v1/models."""

    def __init__(self, gateway: Gateway, keyring: Keyring) -> None:
        self._gateway = gateway
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The one policy that this gateway serves."""
        headers = Headers(scope=scope)
        self._keyring.identify(headers.get("authorization"), headers.get("x-api-key"))
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
            "replicas": gateway.pool.report(),
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


def _fixed(body: dict[str, Any]) -> Callable[[Request], Any]:
    """Answers the same JSON every time."""
    answer = to_json(body)

    async def fixed(_: Request) -> Response:
        return Response(answer, media_type="application/json")

    return fixed


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
    message = f"{request.method} {request.url.path} is not served here"
    # Starlette names the methods that are served.
    headers = getattr(error, "headers", None)
    return error_response(RequestRefused(message, status, headers=headers))
