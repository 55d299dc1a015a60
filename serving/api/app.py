"""The gateway's ASGI application. Only the routes that are listed here can be reached.

Nothing is passed through to an engine. The endpoints are plain ASGI, so that they see at once when
a caller goes away.
"""

import contextlib
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
from onlinerl.errors import RequestRefused
from onlinerl.serving.access.admission import Admission
from onlinerl.serving.access.auth import Keyring
from onlinerl.serving.api.openapi import openapi_document
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.encoding.json import to_json
from onlinerl.serving.feedback.recorder import FeedbackRecorder
from onlinerl.serving.feedback.route import FeedbackRoute
from onlinerl.serving.gateway.answering import Gateway
from onlinerl.serving.http.asgi import CountedApp, GuardedRoute, error_response, json_response
from onlinerl.serving.http.idempotency import Idempotency
from onlinerl.serving.http.protocol_route import EntryChecks, WireRoute
from onlinerl.serving.protocols.chat.protocol import ChatWire
from onlinerl.serving.protocols.completions.protocol import CompletionsWire
from onlinerl.serving.protocols.messages.errors import error_body as anthropic_error
from onlinerl.serving.protocols.messages.protocol import MessagesWire
from onlinerl.serving.protocols.messages.routes import CountTokensRoute
from onlinerl.serving.protocols.responses.protocol import ResponsesWire
from onlinerl.serving.protocols.responses.routes import InputItemsRoute, StoredResponseRoute
from onlinerl.serving.protocols.responses.store import ResponseStore
from onlinerl.serving.wire.protocol import Wire

Routes = dict[str, tuple[str, Callable[..., Any]]]
"""Endpoints by path, each with its methods, e.g. `GET DELETE`."""


def create_app(
    gateway: Gateway,
    *,
    keyring: Keyring,
    feedback: FeedbackRecorder,
    status: Callable[[], dict[str, Any]] = dict,
    responses: ResponseStore | None = None,
) -> Starlette:
    """The gateway's ASGI application; its lifespan starts and closes `gateway`.

    Args:
        gateway: Answers requests.
        keyring: The API keys that are let in.
        feedback: Takes feedback.
        status: Fields that `/health/ready` shows beside the replicas, e.g. the spool's backlog.
        responses: Store of the responses protocol; without it that protocol is not served.
    """
    checks = EntryChecks(
        keyring=keyring,
        admission=Admission(gateway.config.limits, metrics=gateway.metrics),
        idempotency=Idempotency(gateway.config.idempotency, metrics=gateway.metrics),
    )
    routes: Routes = {
        **protocol_routes(gateway, checks, responses=responses),
        **feedback_routes(feedback, checks, config=gateway.config),
        **health_routes(gateway, status),
        **document_routes(gateway, keyring, with_responses=responses is not None),
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
        middleware=[Middleware(CountedApp, metrics=gateway.metrics, paths=frozenset(routes))],
        exception_handlers={404: _no_route, 405: _no_route},
        lifespan=lifespan,
    )


def protocol_routes(
    gateway: Gateway, checks: EntryChecks, *, responses: ResponseStore | None = None
) -> Routes:
    """Routes that sample answers, and those that belong to their protocols."""
    wires: dict[str, Wire] = {
        "/v1/chat/completions": ChatWire(),
        "/v1/completions": CompletionsWire(),
        "/v1/messages": MessagesWire(),
    }
    further: Routes = {
        "/v1/messages/count_tokens": (
            "POST",
            GuardedRoute(CountTokensRoute(gateway, checks), envelope=anthropic_error),
        ),
    }
    if responses is not None:
        wires["/v1/responses"] = ResponsesWire(responses)
        further["/v1/responses/{response_id}"] = (
            "GET DELETE",
            GuardedRoute(StoredResponseRoute(responses, checks.keyring)),
        )
        further["/v1/responses/{response_id}/input_items"] = (
            "GET",
            GuardedRoute(InputItemsRoute(responses, checks.keyring)),
        )
    return {path: wire_route(wire, gateway, checks) for path, wire in wires.items()} | further


def wire_route(wire: Wire, gateway: Gateway, checks: EntryChecks) -> tuple[str, GuardedRoute]:
    """Methods and endpoint of one protocol."""
    return "POST", GuardedRoute(
        WireRoute(wire, gateway=gateway, checks=checks), envelope=wire.error
    )


def feedback_routes(
    feedback: FeedbackRecorder, checks: EntryChecks, *, config: GatewayConfig
) -> Routes:
    """The route that takes feedback."""
    return {"/v1/feedback": ("POST", GuardedRoute(FeedbackRoute(feedback, checks, config=config)))}


def health_routes(gateway: Gateway, status: Callable[[], dict[str, Any]]) -> Routes:
    """Routes without a key, for probes and Prometheus."""
    return {
        "/health/live": ("GET", _live),
        "/health/ready": ("GET", _ready(gateway, status)),
        "/metrics": ("GET", _metrics(gateway)),
        "/version": ("GET", _version(gateway)),
    }


def document_routes(gateway: Gateway, keyring: Keyring, *, with_responses: bool) -> Routes:
    """Routes that describe the gateway: its model, and its OpenAPI document."""
    document = openapi_document(policy=gateway.policy, with_responses=with_responses)
    return {
        "/v1/models": ("GET", GuardedRoute(ModelsRoute(gateway, keyring))),
        "/openapi.json": ("GET", _fixed(document)),
    }


class ModelsRoute:
    """GET /v1/models."""

    def __init__(self, gateway: Gateway, keyring: Keyring) -> None:
        self._gateway = gateway
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a list with the one policy that this gateway serves."""
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
    """An endpoint that always sends the same JSON."""
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
    # For a 405 Starlette lists the methods that are served.
    headers = getattr(error, "headers", None)
    return error_response(RequestRefused(message, status, headers=headers))
