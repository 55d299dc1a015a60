"""The official Anthropic client speaks to a gateway in this process."""

import asyncio
from typing import Any

import anthropic
import pytest

from onlinerl.errors import EngineAborted
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.clients import CALL, THOUGHT, anthropic_client, serving
from tests.serving.protocol_cases import WEATHER
from tests.serving.world import ask

TOOL: dict[str, Any] = {"name": "weather", "description": "Looks.", "input_schema": WEATHER}
ASKED: dict[str, Any] = {
    "model": "assistant",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [TOOL],
}


def volatile(message: anthropic.types.Message) -> dict[str, Any]:
    """A message without what differs between two of them."""
    body = message.model_dump(mode="json", exclude={"id"})
    for block in body["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return body


@pytest.mark.parametrize(
    ("answer", "kinds", "reason"),
    [
        ("Click the link.", ["text"], "end_turn"),
        (THOUGHT + "Click the link.", ["thinking", "text"], "end_turn"),
        (CALL, ["tool_use"], "tool_use"),
        (
            THOUGHT + "Let me look." + CALL + CALL,
            ["thinking", "text", "tool_use", "tool_use"],
            "tool_use",
        ),
        ("One." + CALL + "Two.", ["text", "tool_use", "text"], "tool_use"),
        ("", [], "end_turn"),
    ],
)
async def test_a_streamed_message_is_the_whole_one(
    chatml: TemplateRenderer, answer: str, kinds: list[str], reason: str
) -> None:
    async with serving(chatml, answer) as world:
        client = anthropic_client(world)
        whole = await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            final = await stream.get_final_message()

    assert [block.type for block in whole.content] == kinds
    assert whole.stop_reason == reason
    assert volatile(final) == volatile(whole)
    row = world.interactions[0]
    assert row.protocol == "anthropic.messages"
    assert whole.id == f"msg_{row.interaction_id}"
    assert whole.usage.input_tokens == len(row.prompt_token_ids)
    assert whole.usage.output_tokens == len(row.choices[0].completion_token_ids)


async def test_the_input_of_a_tool_is_what_the_model_wrote(chatml: TemplateRenderer) -> None:
    async with (
        serving(chatml, CALL) as world,
        anthropic_client(world).messages.stream(**ASKED) as stream,
    ):
        inputs = [event.partial_json async for event in stream if event.type == "input_json"]
        (block,) = (await stream.get_final_message()).content

    assert block.type == "tool_use"
    assert (block.name, block.input) == ("weather", {"city": "Bern"})
    assert len(inputs) == 1


async def test_three_turns_with_tools_extend_one_session_token_for_token(
    chatml: TemplateRenderer,
) -> None:
    async with serving(chatml, THOUGHT + "Let me look." + CALL, "It is sunny.", "Yes.") as world:
        client = anthropic_client(world)
        messages: list[Any] = [*ASKED["messages"]]
        one = await client.messages.create(**{**ASKED, "messages": messages})
        messages.append(one.to_param())
        result = {"type": "tool_result", "tool_use_id": one.content[-1].id, "content": "sunny"}
        messages.append({"role": "user", "content": [result]})
        two = await client.messages.create(**{**ASKED, "messages": messages})
        messages += [two.to_param(), {"role": "user", "content": "Sure?"}]
        await client.messages.create(**{**ASKED, "messages": messages})

    first, second, third = world.interactions
    assert (second.parent_id, third.parent_id) == (first.interaction_id, second.interaction_id)
    assert len({row.session_id for row in world.interactions}) == 1
    assert second.prefix_length == len(first.prompt_token_ids) + len(
        first.choices[0].completion_token_ids
    )


async def test_the_tool_runner_runs_with_its_defaults(chatml: TemplateRenderer) -> None:
    looked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Looks."""
        looked.append(city)
        return "sunny"

    async with serving(chatml, CALL, "It is sunny.") as world:
        runner = anthropic_client(world).beta.messages.tool_runner(
            model="assistant",
            max_tokens=200,
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[weather],
        )
        answers = [answer async for answer in runner]

    assert looked == ["Bern"]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
    first, second = world.interactions
    assert second.parent_id == first.interaction_id


async def test_a_stop_sequence_is_named_and_not_shown(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "Click END the link.") as world:
        client = anthropic_client(world)
        asked = {**ASKED, "stop_sequences": ["END"], "tools": []}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()

    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "END")
    assert whole.content[0].to_dict()["text"] == "Click "
    assert volatile(final) == volatile(whole)


async def test_an_answer_at_its_bound_says_so(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "One two three four five six.") as world:
        whole = await anthropic_client(world).messages.create(**{**ASKED, "max_tokens": 2})

    assert whole.stop_reason == "max_tokens"


async def test_counting_tells_what_the_same_request_is_logged_with(
    chatml: TemplateRenderer,
) -> None:
    async with serving(chatml, "Click the link.") as world:
        client = anthropic_client(world)
        counts = []
        messages: list[Any] = [*ASKED["messages"]]
        for _ in range(2):
            body = {**ASKED, "messages": messages}
            counted = {name: body[name] for name in ("model", "messages", "tools")}
            counts.append((await client.messages.count_tokens(**counted)).input_tokens)
            answer = await client.messages.create(**body)
            assert answer.usage.input_tokens == counts[-1]
            messages += [answer.to_param(), {"role": "user", "content": "And?"}]

    assert counts[0] < counts[1]
    assert world.count("onlinerl_gateway_extended_total", known="yes") == 1


async def test_counting_is_refused_in_anthropics_envelope(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "A") as world:
        client = anthropic_client(world)

        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="nobody", messages=ASKED["messages"])
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await anthropic_client(world, key="nobody's").messages.count_tokens(
                model="assistant", messages=ASKED["messages"]
            )
        assert caught.value.body == {
            "type": "error",
            "error": {
                "type": "authentication_error",
                "message": "the API key is missing or unknown",
            },
        }


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_both_headers_carry_the_key(chatml: TemplateRenderer, header: str) -> None:
    async with serving(chatml, "A") as world:
        key = "key-of-acme" if header == "x-api-key" else "Bearer key-of-acme"
        headers = {header: key, "anthropic-version": "2023-06-01"}
        caller = await ask(world, ASKED, path="/v1/messages", key=None, headers=headers)

    assert (caller.status, caller.json["type"]) == (200, "message")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"max_tokens": 5_000}, "max_tokens"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 100_000}},
            "thinking.budget_tokens",
        ),
    ],
)
async def test_what_is_not_supported_is_a_clear_400(
    chatml: TemplateRenderer, change: dict[str, Any], name: str
) -> None:
    async with serving(chatml, "A") as world:
        client = anthropic_client(world)

        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**{**ASKED, **change})
    assert name in caught.value.message


async def test_a_stream_that_breaks_raises_in_the_client(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "One two three four five six.") as world:
        world.engine.hold_at = 2
        client = anthropic_client(world)
        asked = asyncio.create_task(client.messages.create(stream=True, **ASKED))
        while not world.engine.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        world.engine.failure = EngineAborted("the engine went away")
        stream = await asked

        with pytest.raises(anthropic.APIStatusError, match="the engine went away"):
            _ = [event async for event in stream]


async def test_feedback_is_sent_by_the_clients_own_post(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "A") as world:
        client = anthropic_client(world)
        message = await client.messages.create(**ASKED)
        interaction_id = message.id.removeprefix("msg_")
        body = {"interaction_id": interaction_id, "metric": "accepted", "value": True}
        await client.post("/v1/feedback", body=body, cast_to=object)

    assert [row.interaction_id for row in world.feedback] == [interaction_id]


async def test_the_user_is_logged_as_a_hash(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "A") as world:
        client = anthropic_client(world)
        await client.messages.create(metadata={"user_id": "ann"}, **ASKED)

    assert world.interactions[0].user == world.gateway._users.hash("ann", tenant="acme")
