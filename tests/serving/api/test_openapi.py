"""The document describes every route, and the gateway behaves as described."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from onlinerl.serving.api.openapi import openapi_document
from onlinerl.serving.config import LimitsConfig
from onlinerl.serving.protocols.responses.store import MemoryResponseStore
from onlinerl.serving.rendering.protocol import Renderer
from tests.serving.world import KEY, World, ask, body, make_world

DOCUMENT = openapi_document(policy="assistant", with_responses=True)


def make(renderer: Renderer) -> World:
    return make_world(
        renderer,
        responses=MemoryResponseStore(max_rows=100, retain_s=3600),
        limits=LimitsConfig(max_body_bytes=64 * 1024),
    )


def operations(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (method.upper(), path)
        for path, item in document["paths"].items()
        for method in item
        if method in ("get", "post", "delete")
    }


@pytest.mark.parametrize("with_responses", [True, False])
def test_the_document_has_every_route_and_no_other(
    renderer: Renderer, with_responses: bool
) -> None:
    world = make(renderer) if with_responses else make_world(renderer)
    served = {
        (method, route.path)
        for route in world.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }

    document = openapi_document(policy="assistant", with_responses=with_responses)
    assert operations(document) == served


def test_the_document_is_valid_openapi() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()

    assert DOCUMENT["openapi"].startswith("3.1")


def test_every_reference_leads_somewhere() -> None:
    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key == "$ref":
                    yield item
                else:
                    yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    for reference in references(DOCUMENT):
        target: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
        assert isinstance(target, dict)


def test_bodies_are_those_that_are_checked() -> None:
    chat = DOCUMENT["components"]["schemas"]["ChatRequest"]

    assert {"model", "messages"} <= set(chat["required"])
    assert chat["additionalProperties"] is False
    assert chat["properties"]["temperature"]["anyOf"][0]["maximum"] == 2


async def test_it_is_served_without_a_key(renderer: Renderer) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/openapi.json", "headers": []}
    await make(renderer).app(scope, receive, send)

    assert sent[0]["status"] == 200
    assert json.loads(sent[1]["body"]) == DOCUMENT


async def test_the_examples_of_the_document_are_answered(renderer: Renderer) -> None:
    world = make(renderer)
    await world.gateway.pool.look(world.gateway.pool.replicas[0])
    for path, item in DOCUMENT["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        media = content.get("application/json", {})
        named = [example["value"] for example in media.get("examples", {}).values()]
        for example in [media["example"]] if "example" in media else named:
            assert (await ask(world, example, path=path)).status == 200, path


# Requests that are generated from the document


@pytest.fixture(scope="module")
def address(renderer: Renderer) -> Iterator[str]:
    """A gateway with an engine in memory, behind a real socket."""
    server: list[uvicorn.Server] = []
    ready = threading.Event()

    async def serve() -> None:
        world = make(renderer)
        config = uvicorn.Config(world.app, port=0, log_config=None, access_log=False)
        server.append(uvicorn.Server(config))
        serving = asyncio.create_task(server[0].serve())
        while not server[0].started:
            await asyncio.sleep(0.01)
        ready.set()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    port = server[0].servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server[0].should_exit = True
    thread.join(30)


SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)


@SCHEMA.parametrize()
@settings(
    max_examples=15,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, *HealthCheck],
)
def test_no_request_that_the_document_allows_breaks_the_gateway(
    case: schemathesis.Case[Any], address: str
) -> None:
    case.headers["authorization"] = f"Bearer {KEY}"
    if "Idempotency-Key" in case.headers:
        # Most generated keys are equal, so the second body would only be a conflict.
        case.headers["Idempotency-Key"] += str(uuid4())
    case.call_and_validate(
        base_url=address,
        timeout=20,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
    )


def test_a_chat_of_the_document_is_a_chat_of_ours() -> None:
    example = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]

    assert set(body()) <= set(example["application/json"]["example"])
