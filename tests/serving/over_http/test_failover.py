"""What callers see, and what is logged, when a replica fails or an update aborts an answer."""

from collections.abc import Sequence

import pytest

from onlinerl.errors import EngineDisconnected, EngineUnreachable
from onlinerl.serving.interaction.engine import Generate
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import World, ask, body, make_world, rendered, speak

pytestmark = pytest.mark.asyncio


async def make_two(renderer: TemplateRenderer) -> World:
    """Two engines of two versions; an answer goes on where its prompt ends."""
    world = make_world(renderer, num_engines=2)
    said = speak(renderer, "Click the link.")
    prompt = rendered(renderer, [{"role": "user", "content": "How do I reset my password?"}])

    def rest(request: Generate) -> Sequence[int]:
        return said[len(request.token_ids) - len(prompt) :]

    for number, engine in enumerate(world.engines):
        engine._script = rest
        engine.version = f"assistant/{number + 1}"
    for replica in world.gateway.pool.replicas:
        await world.gateway.pool.look(replica)
    return world


@pytest.mark.parametrize("stream", [True, False])
async def test_a_dead_replica_costs_no_request_and_one_row_is_logged(
    renderer: TemplateRenderer, stream: bool
) -> None:
    world = await make_two(renderer)
    world.engines[0].failure = EngineUnreachable("connection refused")
    callers = [await ask(world, body(stream=stream)) for _ in range(4)]

    assert [caller.status for caller in callers] == [200] * 4
    assert all(b"error" not in caller.received for caller in callers)
    told = {caller.headers["x-onlinerl-policy-version"] for caller in callers}
    assert told == {"assistant/2"}, "the version of the replica that answered"
    assert all(b'"system_fingerprint":"assistant/2"' in caller.received for caller in callers)
    assert len(world.interactions) == 4
    for event in world.interactions:
        assert [span.version for span in event.choices[0].version_spans] == ["assistant/2"]
        assert event.trainable
    assert len(world.engines[0].requests) == 1  # it was ejected by the first


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_an_update_aborts_comes_whole_and_says_both_versions(
    renderer: TemplateRenderer, stream: bool
) -> None:
    world = await make_two(renderer)
    for engine in world.engines:
        engine.stops_itself_at = 2
    caller = await ask(world, body(stream=stream))

    (event,) = world.interactions
    shown = caller.text if stream else caller.json["choices"][0]["message"]["content"]
    assert shown == "Click the link."
    assert event.choices[0].finish_reason == "stop"
    assert event.choices[0].completion_token_ids == speak(renderer, "Click the link.")
    assert len(event.choices[0].logprobs) == len(event.choices[0].completion_token_ids)
    assert event.trainable


async def test_an_abort_of_a_constrained_answer_is_told_as_an_error_and_logged_as_what_it_is(
    renderer: TemplateRenderer,
) -> None:
    world = await make_two(renderer)
    for engine in world.engines:
        engine.stops_itself_at = 2
    caller = await ask(world, body(response_format={"type": "json_object"}))

    (event,) = world.interactions
    assert caller.status is not None
    assert caller.status >= 500
    assert event.choices[0].finish_reason == "abort"
    assert not event.trainable


async def test_after_the_first_token_a_failure_is_told_and_nothing_is_asked_again(
    renderer: TemplateRenderer,
) -> None:
    world = await make_two(renderer)
    for engine in world.engines:

        async def pace(request: Generate, *, num_served: int) -> None:
            if num_served == 2:
                raise EngineDisconnected("the connection to the engine broke")

        engine._pace = pace  # type: ignore[method-assign]
    caller = await ask(world, body(stream=True))

    (event,) = world.interactions
    assert caller.status == 200
    assert b"error" in caller.received
    assert b"[DONE]" not in caller.received
    assert sum(len(engine.requests) for engine in world.engines) == 1
    assert event.choices[0].finish_reason == "error"
    assert len(event.choices[0].completion_token_ids) == 2
