import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from onlinerl.errors import EngineRefused
from onlinerl.rollout_store.schema import InteractionEvent
from onlinerl.serving.config import ArmsConfig, LimitsConfig
from onlinerl.serving.gateway import shadow as shadow_module
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from onlinerl.serving.routing.arms import Arms, Target
from tests.serving.world import LOG_KEY, Caller, World, ask, body, make_world

pytestmark = pytest.mark.asyncio


async def make_shadowed(
    renderer: TemplateRenderer, *, share: float = 1.0, canary: float | None = None, **config: Any
) -> World:
    """The champion on one engine, version 14 as shadow on the other."""
    world = make_world(renderer, num_engines=2, **config)
    world.engines[0].version, world.engines[1].version = "assistant/12", "assistant/14"
    world.gateway.router.set_arms(
        Arms(
            canary=Target(arm="canary", version=13, share=canary) if canary is not None else None,
            shadow=Target(arm="shadow", version=14, share=share),
        )
    )
    for replica in world.gateway.pool.replicas:
        await world.gateway.pool.look(replica)
    return world


def arms_of(world: World) -> dict[str, InteractionEvent]:
    return {event.arm: event for event in world.interactions}


async def logged(world: World, number: int) -> None:
    async with asyncio.timeout(60):
        while len(world.interactions) < number:
            await asyncio.sleep(0.001)


def outcomes(world: World, outcome: str) -> float:
    return world.count("onlinerl_gateway_shadows_total", outcome=outcome)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_shadow_answers_the_same_prompt_and_is_shown_to_nobody(
    renderer: TemplateRenderer, stream: bool
) -> None:
    world = await make_shadowed(renderer)
    caller = await ask(world, body(stream=stream))
    await logged(world, 2)
    champion, shadow = arms_of(world)["champion"], arms_of(world)["shadow"]

    assert champion.interaction_id == caller.headers["x-onlinerl-interaction-id"]
    assert shadow.interaction_id.encode() not in caller.received
    assert shadow.interaction_id != champion.interaction_id
    assert shadow.session_id == champion.session_id
    assert shadow.prompt_token_ids == champion.prompt_token_ids
    assert {span.version for span in shadow.choices[0].version_spans} == {"assistant/14"}
    assert {span.version for span in champion.choices[0].version_spans} == {"assistant/12"}
    assert champion.trainable
    assert not shadow.trainable
    assert "shown to nobody" in (shadow.untrainable_reason or "")
    assert (shadow.arm_probability, champion.arm_probability) == (1.0, 1.0)
    assert outcomes(world, "logged") == 1


async def test_every_choice_is_answered_once_more(renderer: TemplateRenderer) -> None:
    world = await make_shadowed(renderer)
    await ask(world, body(n=3))
    await logged(world, 2)
    shadow = arms_of(world)["shadow"]

    assert [choice.choice_index for choice in shadow.choices] == [0, 1, 2]
    assert shadow.ttft_ms is not None


async def test_a_shadow_waits_until_the_callers_own_answer_has_begun(
    renderer: TemplateRenderer,
) -> None:
    world = await make_shadowed(renderer)
    world.engines[0].hold_at = 0
    caller = Caller(world.app, json_body=body(stream=True))
    async with asyncio.timeout(60):
        while not world.engines[0].requests:
            await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0.001)
    asked_before = len(world.engines[1].requests)
    world.engines[0].release.set()
    await caller.done()
    await logged(world, 2)

    assert asked_before == 0
    assert len(world.engines[1].requests) == 1


async def test_a_request_without_consent_is_not_answered_twice(renderer: TemplateRenderer) -> None:
    world = await make_shadowed(renderer)
    await ask(world, headers={"x-onlinerl-consent": "none"})
    await ask(world, key=LOG_KEY)
    await logged(world, 2)

    assert len(world.engines[1].requests) == 1
    assert all(event.consent == "log" for event in world.interactions)


async def test_a_share_of_the_requests_is_answered_twice(renderer: TemplateRenderer) -> None:
    world = await make_shadowed(renderer, share=0.5)
    for _ in range(60):
        await ask(world)
    await world.ended()
    async with asyncio.timeout(60):
        while world.gateway._shadows.num_running:
            await asyncio.sleep(0.001)

    assert 15 < len(world.engines[1].requests) < 45
    assert {e.arm_probability for e in world.interactions if e.arm == "shadow"} == {0.5}


async def test_shadows_are_bounded_and_dropped_ones_are_counted(renderer: TemplateRenderer) -> None:
    world = await make_shadowed(renderer, arms=ArmsConfig(max_shadows=2))
    world.engines[1].hold_at = 0
    for _ in range(5):
        await ask(world)
    running = world.gateway._shadows.num_running
    world.engines[1].release.set()
    await logged(world, 7)

    assert running == 2
    assert outcomes(world, "dropped_busy") == 3
    assert outcomes(world, "logged") == 2


async def test_shadows_are_dropped_first_under_load(renderer: TemplateRenderer) -> None:
    world = await make_shadowed(
        renderer, limits=LimitsConfig(max_in_flight=4), arms=ArmsConfig(shadow_load=0.5)
    )
    world.engines[0].hold_at = 1
    callers = [Caller(world.app, json_body=body(stream=True)) for _ in range(4)]
    async with asyncio.timeout(60):
        while len(world.engines[0].requests) < 4:
            await asyncio.sleep(0.001)
    world.engines[0].release.set()
    for caller in callers:
        await caller.done()

    assert [caller.status for caller in callers] == [200] * 4
    # The first of the four was alone when it came.
    assert outcomes(world, "dropped_busy") == 3


async def test_a_shadow_that_fails_disturbs_nobody(
    renderer: TemplateRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world = await make_shadowed(renderer)
    good = world.engines[1].weight_version

    async def version() -> str:
        return "assistant/14"

    world.engines[1].weight_version = version  # type: ignore[method-assign]
    world.engines[1].failure = EngineRefused("out of memory", 500)
    caller = await ask(world)
    async with asyncio.timeout(60):
        while not outcomes(world, "failed"):
            await asyncio.sleep(0.001)
    world.engines[1].weight_version = good  # type: ignore[method-assign]
    told = [vars(record) for record in caplog.records if record.name == shadow_module.__name__]

    assert caller.status == 200
    assert [event.arm for event in world.interactions] == ["champion"]
    assert [(each["error"], each["status"]) for each in told] == [("EngineRefused", 500)]
    assert "out of memory" not in str(told), "what an engine says may quote the request"


async def test_a_shadow_without_a_replica_is_dropped(renderer: TemplateRenderer) -> None:
    world = await make_shadowed(renderer)
    world.engines[1].version = "assistant/15"
    await world.gateway.pool.look(world.gateway.pool.replicas[1])
    await ask(world)
    async with asyncio.timeout(60):
        while not outcomes(world, "dropped_no_replica"):
            await asyncio.sleep(0.001)

    assert [event.arm for event in world.interactions] == ["champion"]


async def test_a_gateway_that_stops_drops_its_shadows(renderer: TemplateRenderer) -> None:
    world = await make_shadowed(renderer)
    world.engines[1].hold_at = 0
    await ask(world)
    async with asyncio.timeout(60):
        while not world.engines[1].requests:
            await asyncio.sleep(0.001)
    await world.gateway.close()

    assert outcomes(world, "dropped_stopping") == 1
    assert world.engines[1].closed == [world.engines[1].requests[0].request_id]


async def test_a_canarys_answer_is_logged_with_its_arm_and_probability(
    renderer: TemplateRenderer,
) -> None:
    world = await make_shadowed(renderer, canary=0.5, share=0.0)
    world.engines[1].version = "assistant/13"
    await world.gateway.pool.look(world.gateway.pool.replicas[1])
    for number in range(40):
        await ask(world, headers={"x-onlinerl-session-id": f"s{number}"})

    found = {
        (e.arm, e.arm_probability, e.choices[0].version_spans[0].version)
        for e in world.interactions
    }
    assert found == {("canary", 0.5, "assistant/13"), ("champion", 0.5, "assistant/12")}
    assert all(event.trainable for event in world.interactions)


async def test_readiness_tells_of_every_replica(renderer: TemplateRenderer) -> None:
    world = await make_shadowed(renderer)
    answer = TestClient(world.app).get("/health/ready").json()

    assert [replica["version"] for replica in answer["replicas"]] == [
        "assistant/12",
        "assistant/14",
    ]
