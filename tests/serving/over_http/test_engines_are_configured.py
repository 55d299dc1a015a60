"""Only the configuration names engines: no request can add one, or lead to one."""

from typing import Any

import pytest
from pydantic import ValidationError

from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import Caller, World, ask, body, make_world

pytestmark = pytest.mark.asyncio

ELSEWHERE = "http://169.254.169.254/latest"


@pytest.fixture
async def world(renderer: TemplateRenderer) -> World:
    world = make_world(renderer)
    await world.gateway.router.start()
    return world


def engines(world: World) -> list[str]:
    return [replica.url for replica in world.gateway.pool.replicas]


@pytest.mark.parametrize(
    "field", ["base_url", "api_base", "engine", "engines", "upstream", "endpoint", "callback_url"]
)
async def test_a_body_that_names_an_engine_is_refused(world: World, field: str) -> None:
    caller = await ask(world, body(**{field: ELSEWHERE}))
    await world.gateway.close()

    assert caller.status == 400
    assert field.encode() in caller.received
    assert engines(world) == ["memory://0"]
    assert world.engine.requests == []


@pytest.mark.parametrize(
    "header",
    ["host", "x-forwarded-host", "x-forwarded-for", "forwarded", "x-upstream", "x-onlinerl-engine"],
)
async def test_a_header_that_names_a_host_changes_nothing(world: World, header: str) -> None:
    caller = await ask(world, headers={header: "169.254.169.254"})
    await world.gateway.close()

    assert caller.status == 200
    assert engines(world) == ["memory://0"]
    assert len(world.engine.requests) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/register",
        "/v1/engines",
        "/v1/workers",
        "/add_worker",
        "/v1/load_lora_adapter",
        "/pause",
        "/collective_rpc",
        "/inference/v1/generate",
        f"/{ELSEWHERE}",
        "//169.254.169.254/v1/chat/completions",
        "/v1/chat/completions/../../pause",
    ],
)
async def test_no_path_adds_an_engine_or_leads_to_one(world: World, path: str) -> None:
    registration: dict[str, Any] = {"url": ELSEWHERE, "worker_url": ELSEWHERE}
    caller = await Caller(world.app, path=path, json_body=registration).done()
    await world.gateway.close()

    assert caller.status in (404, 405)
    assert engines(world) == ["memory://0"]
    assert world.engine.requests == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "169.254.169.254", "gopher://x", ""])
async def test_an_engine_of_the_configuration_is_an_http_address(url: str) -> None:
    with pytest.raises(ValidationError, match="not an http"):
        GatewayConfig(engines=(url,))
