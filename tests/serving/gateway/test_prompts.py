"""When a known conversation is extended, and when it starts anew, seen from the gateway."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onlinerl.rollout_store.schema import InteractionEvent
from onlinerl.serving.rendering.protocol import Renderer
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.families import family_renderer
from tests.serving.rendering.test_protocol import MODE_IN_SYSTEM, THINKING
from tests.serving.talking import with_template
from tests.serving.world import USER, World, ask, body, make_world, rendered, speak

ON: Mapping[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
OFF: Mapping[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
AS_JSON: Mapping[str, Any] = {"response_format": {"type": "json_object"}}


def followed(answer: str, question: str = "And then?") -> list[dict[str, str]]:
    return [
        *USER,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]


async def said(world: World, **changes: Any) -> str:
    """The content of an answer; its reasoning is left out of what is sent next."""
    caller = await ask(world, body(**changes))
    assert caller.status == 200, caller.received
    content: str = caller.json["choices"][0]["message"]["content"]
    return content


async def two_turns(
    renderer: Renderer,
    sampled: Sequence[int],
    *,
    first: Mapping[str, Any],
    then: Mapping[str, Any],
) -> tuple[World, InteractionEvent, InteractionEvent]:
    world = make_world(renderer, sampled, speak(renderer, "ok"))
    await world.gateway.start()
    answer = await said(world, **first)
    await said(world, messages=followed(answer), **then)
    await world.ended()
    one, two = world.interactions
    assert one.session_id == two.session_id
    return world, one, two


async def test_a_conversation_that_fits_without_its_reasoning_starts_anew(
    chatml: TemplateRenderer,
) -> None:
    """A client that leaves the reasoning out must not be told that its few words are too many."""
    thought = speak(chatml, "<think>\n" + 60 * "very long thought " + "\n</think>\n\nYes.")
    world = make_world(chatml, thought, speak(chatml, "ok"), max_model_len=300)
    await world.gateway.start()
    answer = await said(world)
    messages = followed(answer, "And then?" + 100 * " then")
    await said(world, messages=messages)
    await world.ended()
    one, two = world.interactions

    assert len(thought) > 180
    assert (one.session_id, two.parent_id) == (two.session_id, None)
    assert list(world.engine.requests[1].token_ids) == rendered(chatml, messages)


async def test_what_is_to_be_sampled_must_fit_as_well(chatml: TemplateRenderer) -> None:
    thought = speak(chatml, "<think>\n" + 60 * "very long thought " + "\n</think>\n\nYes.")
    world = make_world(chatml, thought, speak(chatml, "ok"), max_model_len=300)
    await world.gateway.start()
    answer = await said(world)
    for max_tokens in (10, 100):
        await said(world, messages=followed(answer), max_tokens=max_tokens)
    await world.ended()
    one, short, long = world.interactions

    assert short.parent_id == one.interaction_id
    assert (long.parent_id, long.session_id) == (None, one.session_id)


async def test_a_switch_that_the_template_writes_into_a_message_starts_anew(
    smollm2_dir: Path,
) -> None:
    renderer = TemplateRenderer(with_template(smollm2_dir, MODE_IN_SYSTEM), kind="chatml")
    hello = speak(renderer, "hello")
    for first, then in ((AS_JSON, ON), (OFF, ON), (ON, OFF), (ON, AS_JSON)):
        world, _, two = await two_turns(renderer, hello, first=first, then=then)
        text = renderer._codec.decode_all(world.engine.requests[1].token_ids)
        mode = "/think" if then is ON else "/no_think"

        assert two.parent_id is None
        assert text.startswith(f"<|im_start|>system\nReasoning Mode: {mode}<|im_end|>\n")
    for first, then in ((OFF, AS_JSON), (ON, ON), (ON, {})):
        _, one, two = await two_turns(renderer, hello, first=first, then=then)
        assert two.parent_id == one.interaction_id


async def test_a_switch_that_only_begins_the_answer_extends(smollm2_dir: Path) -> None:
    renderer = TemplateRenderer(with_template(smollm2_dir, THINKING), kind="chatml")
    for first, then in ((OFF, ON), (AS_JSON, ON)):
        _, one, two = await two_turns(renderer, speak(renderer, "hello"), first=first, then=then)
        assert two.parent_id == one.interaction_id


async def test_a_family_that_writes_the_switch_into_a_message_starts_anew() -> None:
    renderer = family_renderer("gemma4")
    hello = renderer.tokenize("hello<turn|>")
    world, _, two = await two_turns(renderer, hello, first=OFF, then=ON)

    assert two.parent_id is None
    text = renderer._codec.decode_all(world.engine.requests[1].token_ids)
    assert text.startswith("<bos><|turn>system\n<|think|>")
    _, one, two = await two_turns(renderer, hello, first=OFF, then={})
    assert two.parent_id == one.interaction_id


async def test_an_answer_cut_within_reasoning_that_is_left_out_starts_anew(
    chatml: TemplateRenderer,
) -> None:
    thought = chatml.tokenize("<think>\nLook first")
    cut = {"max_tokens": len(thought) - 1}
    world, _, two = await two_turns(chatml, thought, first=cut, then={})

    assert two.parent_id is None
    assert list(world.engine.requests[1].token_ids) == rendered(chatml, followed(""))


async def test_a_cut_answer_of_a_family_without_an_end_of_its_own_starts_anew() -> None:
    renderer = family_renderer("glm-5")
    cut = {"max_tokens": 4}
    sampled = renderer.tokenize("</think>one two three four")
    world, _, two = await two_turns(renderer, sampled, first=cut, then={})
    text = renderer._codec.decode_all(world.engine.requests[1].token_ids)

    assert two.parent_id is None
    assert "<|endoftext|>" not in text
