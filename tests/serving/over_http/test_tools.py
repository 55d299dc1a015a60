"""Calls, reasoning and constraints through the whole gateway, as a client of OpenAI sees them."""

from typing import Any

import pytest

from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import USER, Caller, World, ask, body, make_world, speak

pytestmark = pytest.mark.asyncio

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
SAID = f"<think>Rome, surely.</think>Let me look.{CALL}"
WHICH = {"role": "user", "content": "Which?"}


async def started(world: World) -> World:
    for replica in world.gateway.pool.replicas:
        await world.gateway.pool.look(replica)
    return world


@pytest.fixture
async def world(chatml: TemplateRenderer) -> World:
    return await started(make_world(chatml, speak(chatml, SAID), speak(chatml, "Sunny.")))


def with_tools(**changes: Any) -> dict[str, Any]:
    return body(tools=[TOOL], **changes)


def message_of(caller: Caller) -> dict[str, Any]:
    message: dict[str, Any] = caller.json["choices"][0]["message"]
    return message


def deltas(caller: Caller) -> list[dict[str, Any]]:
    chunks = [event for event in caller.events if event != "[DONE]" and event["choices"]]
    return [chunk["choices"][0]["delta"] for chunk in chunks]


# Calls


async def test_a_call_comes_whole(world: World) -> None:
    caller = await ask(world, with_tools())

    message = message_of(caller)
    (call,) = message["tool_calls"]
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "Rome, surely.")
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}
    assert caller.json["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_streamed_call_is_the_same_as_a_whole_one(world: World) -> None:
    whole = message_of(await ask(world, with_tools()))
    world.answers[1] = world.answers[0]
    caller = await ask(world, with_tools(stream=True))

    calls = [call for delta in deltas(caller) for call in delta.get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}
    assert [call["function"]["name"] for call in calls if "id" in call] == ["weather"]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments == whole["tool_calls"][0]["function"]["arguments"]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas(caller))
    assert (caller.text, thought) == (whole["content"], whole["reasoning_content"])
    assert caller.events[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_logged_ids_of_a_call_decode_to_its_markup(world: World, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    caller = await ask(world, with_tools(stream=stream, **options))

    (event,) = world.interactions
    (choice,) = event.choices
    assert world.renderer.decode(choice.completion_token_ids) == SAID
    usage = caller.events[-2]["usage"] if stream else caller.json["usage"]
    assert usage["completion_tokens"] == len(choice.completion_token_ids) == len(choice.logprobs)
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 4 <= reasoning < usage["completion_tokens"]
    assert (choice.finish_reason, event.trainable) == ("tool_calls", True)


async def test_without_parallel_calls_the_engine_is_stopped_at_the_second(
    chatml: TemplateRenderer,
) -> None:
    world = await started(make_world(chatml, speak(chatml, f"{CALL}\n{CALL}\nand much more")))
    caller = await ask(world, with_tools(parallel_tool_calls=False))

    assert len(message_of(caller)["tool_calls"]) == 1
    assert caller.json["choices"][0]["finish_reason"] == "tool_calls"
    assert len(world.engine.aborted) == 1
    (event,) = world.interactions
    assert "much more" not in world.renderer.decode(event.choices[0].completion_token_ids)


async def test_tools_that_may_not_be_called_are_neither_told_nor_read(world: World) -> None:
    caller = await ask(world, with_tools(tool_choice="none"))

    assert "tool_calls" not in message_of(caller)
    assert message_of(caller)["content"] == f"Let me look.{CALL}"
    (event,) = world.interactions
    assert "weather" not in world.renderer.decode(event.prompt_token_ids)


# What follows a call


def after_call(message: dict[str, Any], *, arguments: str | None = None) -> list[dict[str, Any]]:
    (call,) = message["tool_calls"]
    if arguments is not None:
        call = {**call, "function": {**call["function"], "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"}
    return [*USER, {**message, "tool_calls": [call]}, result]


@pytest.mark.parametrize(
    ("arguments", "extends"),
    [
        (None, True),
        ('{"days":2,"city":"Rome"}', True),
        ('{ "city" : "R\\u006fme", "days": 2 }', True),
        ('{"city": "Rome", "days": 3}', False),
    ],
)
async def test_a_call_that_is_echoed_in_another_spelling_still_extends(
    world: World, arguments: str | None, extends: bool
) -> None:
    first = message_of(await ask(world, with_tools()))
    await ask(world, with_tools(messages=after_call(first, arguments=arguments)))

    one, two = world.interactions
    assert (two.parent_id == one.interaction_id) == extends
    known = [*one.prompt_token_ids, *one.choices[0].completion_token_ids]
    sent = list(world.engine.requests[1].token_ids)
    assert (sent[: len(known)] == known) == extends
    assert world.renderer.decode(sent).count("18 degrees") == 1


@pytest.mark.parametrize(
    "arguments", [r'{"city": "\ud800"}', '{"city":' * 2000 + "1" + "}" * 2000, '{"city": NaN}']
)
async def test_arguments_that_are_not_quite_json_are_told_to_the_model_as_they_were_written(
    chatml: TemplateRenderer, arguments: str
) -> None:
    world = await started(make_world(chatml, max_model_len=32_768))
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    caller = await ask(
        world, with_tools(messages=after_call({"role": "assistant", "tool_calls": [call]}))
    )

    assert caller.status == 200
    assert f'"arguments": {arguments}}}' in world.renderer.decode(
        world.engine.requests[0].token_ids
    )


@pytest.mark.parametrize(
    ("reasoning", "extends"), [(None, True), ("Rome, surely.", True), ("Paris!", False)]
)
async def test_reasoning_may_be_dropped_and_not_be_changed(
    world: World, reasoning: str | None, extends: bool
) -> None:
    first = message_of(await ask(world, with_tools()))
    first["reasoning_content"] = reasoning
    await ask(world, with_tools(messages=after_call(first)))

    one, two = world.interactions
    assert (two.parent_id == one.interaction_id) == extends
    assert (two.session_id == one.session_id) == extends


async def test_a_changed_list_of_tools_starts_anew(world: World) -> None:
    first = message_of(await ask(world, with_tools()))
    await ask(world, body(tools=[TOOL, OTHER], messages=after_call(first)))

    one, two = world.interactions
    assert (two.parent_id, two.prefix_length) == (None, 0)
    assert one.renderer.name == two.renderer.name
    assert one.renderer.hash != two.renderer.hash


async def test_a_retry_is_a_second_branch_of_the_same_parent(world: World) -> None:
    first = message_of(await ask(world, with_tools()))
    for _ in range(2):
        await ask(world, with_tools(messages=after_call(first)))

    one, two, three = world.interactions
    assert two.parent_id == three.parent_id == one.interaction_id
    assert two.interaction_id != three.interaction_id
    assert two.prompt_token_ids == three.prompt_token_ids


async def test_a_turn_that_cannot_be_extended_leaves_the_one_before_it_to_extend(
    chatml: TemplateRenderer,
) -> None:
    said = [speak(chatml, text) for text in ("One.", "Two END more", "Three.")]
    world = await started(make_world(chatml, *said))
    messages = list(USER)
    for stop in (None, "END", None):
        reply = message_of(await ask(world, body(messages=messages, stop=stop)))
        messages += [reply, WHICH]

    one, two, three = world.interactions
    assert (two.parent_id, three.parent_id) == (one.interaction_id, one.interaction_id)
    assert "END" not in world.renderer.decode(three.prompt_token_ids)


# Sessions


async def test_the_header_names_the_session_before_the_body_does(world: World) -> None:
    named = body(metadata={"session_id": "run-1"})
    await ask(world, named)
    await ask(world, named, headers={"x-onlinerl-session-id": "run-2"})

    assert [event.session_id for event in world.interactions] == ["run-1", "run-2"]


# What is constrained


async def test_a_format_is_enforced_by_the_engine_and_not_learned_from(world: World) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    await ask(world, body(response_format=form))

    (event,) = world.interactions
    assert world.engine.requests[0].sampling["structured_outputs"] == {"json": schema}
    assert "structured output" in (event.untrainable_reason or "")


@pytest.mark.parametrize(
    "changes",
    [{"frequency_penalty": 0.5}, {"presence_penalty": -0.5}, {"logit_bias": {"5": -100}}],
)
async def test_a_shaped_distribution_is_served_logged_and_not_learned_from(
    world: World, changes: dict[str, Any]
) -> None:
    await ask(world, body(**changes))

    (name,) = changes
    (event,) = world.interactions
    assert world.engine.requests[0].sampling[name] == changes[name]
    assert (event.sampling.model_extra or {})[name] == changes[name]
    assert (event.untrainable_reason or "").startswith(name)


async def test_a_format_and_tools_are_refused(world: World) -> None:
    caller = await ask(world, with_tools(response_format={"type": "json_object"}))

    assert caller.status == 400
    assert caller.json["error"]["param"] == "response_format"
    assert world.engine.requests == []
