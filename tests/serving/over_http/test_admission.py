"""Limits and `Idempotency-Key` as a caller sees them, through the whole application."""

import asyncio
from typing import Any

import pytest

from onlinerl.errors import EngineAborted, EngineRefused
from onlinerl.serving.config import IdempotencyConfig, KeyLimits, LimitsConfig
from onlinerl.serving.rendering.protocol import Renderer
from tests.serving.world import KEY, OTHER_KEY, Caller, World, ask, body, make_world


async def started(world: World) -> World:
    for replica in world.gateway.pool.replicas:
        await world.gateway.pool.look(replica)
    return world


async def limited(renderer: Renderer, **limits: Any) -> World:
    return await started(make_world(renderer, limits=LimitsConfig(**limits)))


@pytest.fixture
async def world(renderer: Renderer) -> World:
    return await started(make_world(renderer))


async def test_a_full_gateway_says_when_to_come_back(renderer: Renderer) -> None:
    world = await limited(renderer, max_in_flight=1)
    world.engine.hold_at = 1
    running = Caller(world.app, json_body=body())
    while not world.engine.requests:
        await asyncio.sleep(0.001)
    refused = await ask(world)
    world.engine.release.set()
    await running.done()

    assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await ask(world)).status == 200


async def test_a_key_that_is_full_does_not_shut_out_another(renderer: Renderer) -> None:
    world = await limited(renderer, per_key=KeyLimits(max_in_flight=1))
    world.engine.hold_at = 1
    running = Caller(world.app, json_body=body())
    while not world.engine.requests:
        await asyncio.sleep(0.001)
    refused = await ask(world)
    other = Caller(world.app, json_body=body(), key=OTHER_KEY)
    world.engine.release.set()

    assert refused.status == 429
    assert (await other.done()).status == (await running.done()).status == 200


async def test_tokens_that_were_used_are_taken_from_the_rate(renderer: Renderer) -> None:
    world = await limited(renderer, per_key=KeyLimits(tokens_per_minute=1000))
    first = await ask(world, body(max_tokens=50))
    (event,) = world.interactions
    used = len(event.prompt_token_ids) + len(event.choices[0].completion_token_ids)
    second = await ask(world, body(max_tokens=50))

    left = [int(found.headers["x-ratelimit-remaining-tokens"]) for found in (first, second)]
    assert 1000 - 200 < left[0] < 1000 - 50
    # What is reserved for an answer in flight is as much both times.
    assert abs((left[0] - left[1]) - used) <= 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_caller_that_leaves_gives_its_place_back(
    renderer: Renderer, stream: bool, hold_at: int
) -> None:
    world = await limited(renderer, max_in_flight=1)
    for _ in range(5):
        world.engine.hold_at = hold_at
        num_asked = len(world.engine.requests)
        caller = Caller(world.app, json_body=body(stream=stream))
        while len(world.engine.requests) == num_asked:
            await asyncio.sleep(0.001)
        caller.leave()
        await caller.done()
        await world.ended()

    world.engine.hold_at = None
    assert (await ask(world)).status == 200


@pytest.mark.parametrize(
    "bad", [{"json_body": {"model": "x"}}, {"raw": b"{"}, {"json_body": body(model="other")}]
)
async def test_a_refused_request_gives_its_place_back(
    renderer: Renderer, bad: dict[str, Any]
) -> None:
    world = await limited(renderer, max_in_flight=1)
    statuses = [(await Caller(world.app, **bad).done()).status for _ in range(3)]

    assert all(status in (400, 404) for status in statuses)
    assert (await ask(world)).status == 200


async def test_an_engine_that_fails_gives_the_place_back(renderer: Renderer) -> None:
    world = await limited(renderer, max_in_flight=1)
    world.engine.failure = EngineRefused("died", 500)
    statuses = [(await ask(world)).status for _ in range(3)]
    world.engine.failure = None

    assert statuses == [500, 500, 500]
    assert (await ask(world)).status == 200


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/v1/feedback"]
)
async def test_a_body_that_does_not_come_gives_its_place_back(
    renderer: Renderer, path: str
) -> None:
    world = await limited(renderer, max_in_flight=1)
    slow = Caller(world.app, path=path)
    slow._sent_body = True  # nothing comes until it leaves
    await slow.done()

    assert (slow.status, slow.headers["connection"]) == (408, "close")
    assert "did not come within 0.5 s" in slow.received.decode()
    assert (await ask(world)).status == 200


ONCE = {"idempotency-key": "k1"}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_same_key_gets_the_same_bytes_and_one_row(world: World, stream: bool) -> None:
    first = await ask(world, body(stream=stream), headers=ONCE)
    again = await ask(world, body(stream=stream), headers=ONCE)

    assert (again.status, again.headers, again.received) == (200, first.headers, first.received)
    assert first.headers["x-onlinerl-interaction-id"] == world.interactions[0].interaction_id
    assert len(world.interactions) == len(world.engine.requests) == 1


async def test_equal_bodies_without_a_key_are_two_rows(world: World) -> None:
    await ask(world)
    await ask(world)

    assert len(world.interactions) == 2


async def test_the_key_with_another_body_is_refused(world: World) -> None:
    await ask(world, body(), headers=ONCE)
    other = await ask(world, body(max_tokens=3), headers=ONCE)
    narrower = await ask(world, body(), headers={**ONCE, "x-onlinerl-consent": "none"})

    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_key_reused")
    assert narrower.status == 422
    assert len(world.interactions) == 1


async def test_the_key_of_one_tenant_is_nothing_to_another(world: World) -> None:
    one = await ask(world, body(), headers=ONCE)
    two = await ask(world, body(), headers=ONCE, key=OTHER_KEY)

    ids = [found.headers["x-onlinerl-interaction-id"] for found in (one, two)]
    assert ids[0] != ids[1]
    assert [event.tenant for event in world.interactions] == ["acme", "globex"]


async def test_two_at_once_are_one_answer(world: World) -> None:
    world.engine.hold_at = 2
    both = [Caller(world.app, json_body=body(stream=True), headers=ONCE) for _ in range(2)]
    await asyncio.sleep(0.02)
    world.engine.release.set()
    one, two = [await caller.done() for caller in both]

    assert one.received == two.received
    assert len(world.interactions) == 1


async def test_an_answer_whose_caller_left_is_sampled_anew(world: World) -> None:
    world.engine.hold_at = 2
    caller = Caller(world.app, json_body=body(stream=True), headers=ONCE)
    while not world.engine.requests:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    caller.leave()
    await caller.done()
    await world.ended()
    world.engine.hold_at = None
    again = await ask(world, body(stream=True), headers=ONCE)

    assert again.text == "Click the link."
    reasons = [event.choices[0].finish_reason for event in world.interactions]
    assert reasons == ["client_disconnect", "stop"]


async def test_a_stream_that_broke_is_sampled_anew(world: World) -> None:
    world.engine.hold_at = 2
    caller = Caller(world.app, json_body=body(stream=True), headers=ONCE)
    while not world.engine.requests:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    world.engine.failure = EngineAborted("died")
    await caller.done()
    world.engine.failure, world.engine.hold_at = None, None
    again = await ask(world, body(stream=True), headers=ONCE)

    assert again.text == "Click the link."


async def test_a_refusal_is_not_kept(world: World) -> None:
    world.engine.failure = EngineRefused("died", 500)
    failed = await ask(world, body(), headers=ONCE)
    world.engine.failure = None
    again = await ask(world, body(), headers=ONCE)

    assert (failed.status, again.status) == (500, 200)


async def test_waiting_for_an_equal_request_holds_a_place_that_leaving_frees(
    renderer: Renderer,
) -> None:
    world = await limited(renderer, max_in_flight=2)
    world.engine.hold_at = 1
    first = Caller(world.app, json_body=body(), headers=ONCE)
    second = Caller(world.app, json_body=body(), headers=ONCE)
    await asyncio.sleep(0.02)
    full = await ask(world)
    second.leave()
    await second.done()
    third = Caller(world.app, json_body=body(), headers={"idempotency-key": "k2"})
    await asyncio.sleep(0.02)
    world.engine.release.set()

    assert (await first.done()).status == (await third.done()).status == 200
    assert (full.status, second.status) == (429, None)


async def test_a_gateway_without_memory_for_keys_says_so(renderer: Renderer) -> None:
    world = await started(make_world(renderer, idempotency=IdempotencyConfig(max_entries=0)))

    assert (await ask(world, body(), headers=ONCE)).status == 400
    assert (await ask(world, body(), key=KEY)).status == 200
