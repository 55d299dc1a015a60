"""Whatever is said in whatever turns: the log holds exactly the tokens that the engine got."""

import asyncio
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from onlinerl.rollout_store.schema import InteractionEvent
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import World, ask, body, make_world

ANSWER = st.lists(st.integers(min_value=0, max_value=49151), min_size=1, max_size=12)


def whole_prompt(event: InteractionEvent, events: Mapping[str, InteractionEvent]) -> list[int]:
    """The prompt of an event, with what it shares with its ancestors."""
    if event.parent_id is None:
        assert event.prefix_length == 0
        return event.prompt_token_ids
    parent = events[event.parent_id]
    completion = parent.choices[event.parent_choice].completion_token_ids
    shared = [*whole_prompt(parent, events), *completion]
    assert event.prefix_length == len(shared)
    return [*shared, *event.prompt_token_ids]


async def converse(world: World, questions: Sequence[str], *, stream: bool) -> None:
    for replica in world.gateway.pool.replicas:
        await world.gateway.pool.look(replica)
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        caller = await ask(world, body(messages=messages, stream=stream))
        assert caller.status == 200, caller.received
        text = caller.text if stream else caller.json["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(ANSWER, min_size=3, max_size=3),
    ended=st.booleans(),
    questions=st.lists(st.text(max_size=12), min_size=3, max_size=3),
    stream=st.booleans(),
)
def test_the_log_gives_back_every_prompt_token_for_token(
    renderer: TemplateRenderer,
    answers: list[list[int]],
    ended: bool,
    questions: list[str],
    stream: bool,
) -> None:
    said = [[*answer, 2] if ended else answer for answer in answers]
    world = make_world(renderer, *said)
    asyncio.run(converse(world, questions, stream=stream))
    events = {event.interaction_id: event for event in world.interactions}

    assert len(events) == 3
    for event, request, answer in zip(world.interactions, world.engine.requests, said, strict=True):
        assert whole_prompt(event, events) == list(request.token_ids)
        assert event.choices[0].completion_token_ids == answer
    assert len({event.session_id for event in world.interactions}) == 1
