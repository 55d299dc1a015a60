"""The official OpenAI client speaks the responses protocol to a gateway in this process."""

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam, Response, ResponseInputItemParam

from onlinerl.errors import EngineAborted
from onlinerl.serving.config import ResponsesConfig
from onlinerl.serving.protocols.responses.sqlite_store import SqliteResponseStore
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.clients import CALL, THOUGHT, openai_client, serving
from tests.serving.protocol_cases import WEATHER
from tests.serving.world import LOG_KEY, OTHER_KEY, World

TOOL: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "Looks.",
    "parameters": WEATHER,
    "strict": False,
}


def volatile(response: Response) -> dict[str, Any]:
    """A response without what differs between two of them."""
    body = response.model_dump(mode="json", exclude={"id", "created_at"})
    for item in body["output"]:
        item.pop("id", None)
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return body


def token_ids(world: World) -> list[list[int]]:
    """Whole prompt and completion of every logged row, its parents' tokens included."""
    whole: dict[str, list[int]] = {}
    for row in world.interactions:
        known = whole[row.parent_id][: row.prefix_length] if row.parent_id else []
        (choice,) = row.choices
        whole[row.interaction_id] = [
            *known,
            *row.prompt_token_ids,
            *choice.completion_token_ids,
        ]
    return list(whole.values())


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        ("Click the link.", ["message"]),
        (THOUGHT + "Click the link.", ["reasoning", "message"]),
        (CALL, ["function_call"]),
        (THOUGHT + "Let me look." + CALL + CALL, ["reasoning", "message"] + ["function_call"] * 2),
        ("One." + CALL + "Two.", ["message", "function_call", "message"]),
        ("", ["message"]),
    ],
)
async def test_a_streamed_response_is_the_whole_one(
    chatml: TemplateRenderer, answer: str, kinds: list[str]
) -> None:
    async with serving(chatml, answer) as world:
        client = openai_client(world)
        asked: dict[str, Any] = {"model": "assistant", "input": "Weather?", "tools": [TOOL]}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()

    assert [item.type for item in whole.output] == kinds
    assert volatile(final) == volatile(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert whole.usage is not None
    row = world.interactions[0]
    assert whole.usage.input_tokens == len(row.prompt_token_ids)
    assert whole.usage.output_tokens == len(row.choices[0].completion_token_ids)


async def test_logprobs_of_a_streamed_response_are_those_of_the_whole_one(
    chatml: TemplateRenderer,
) -> None:
    asked: dict[str, Any] = {
        "model": "assistant",
        "input": "Hi",
        "include": ["message.output_text.logprobs"],
        "tools": [TOOL],
    }
    async with serving(chatml, THOUGHT + "Click the link." + CALL) as world:
        client = openai_client(world)
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()

    message = next(item for item in whole.output if item.type == "message")
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    # Markup is not shown, but its tokens come with the text beside it.
    assert part.text.strip() in "".join(logprob.token for logprob in part.logprobs)
    assert volatile(final) == volatile(whole)


async def test_three_turns_with_tools_extend_one_session_token_for_token(
    chatml: TemplateRenderer,
) -> None:
    async with serving(chatml, THOUGHT + CALL, "It is sunny.", "Yes.") as world:
        client = openai_client(world)
        one = await client.responses.create(model="assistant", input="Weather?", tools=[TOOL])
        call = one.output[-1]
        assert call.type == "function_call"
        output: ResponseInputItemParam = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": "sunny",
        }
        two = await client.responses.create(
            model="assistant", input=[output], tools=[TOOL], previous_response_id=one.id
        )
        three = await client.responses.create(
            model="assistant", input="Sure?", tools=[TOOL], previous_response_id=two.id
        )

    first, second, third = world.interactions
    assert [r.id.removeprefix("resp_") for r in (one, two, three)] == [
        row.interaction_id for row in world.interactions
    ]
    assert (second.parent_id, third.parent_id) == (first.interaction_id, second.interaction_id)
    assert len({row.session_id for row in world.interactions}) == 1
    a, b, c = token_ids(world)
    assert b[: len(a)] == a
    assert c[: len(b)] == b
    assert two.output_text == "It is sunny."
    assert three.previous_response_id == two.id


async def test_a_conversation_that_is_sent_back_whole_extends_too(
    chatml: TemplateRenderer,
) -> None:
    async with serving(chatml, THOUGHT + "Let me look." + CALL, "It is sunny.") as world:
        client = openai_client(world)
        items: list[Any] = [{"role": "user", "content": "Weather?"}]
        one = await client.responses.create(
            model="assistant", input=items, tools=[TOOL], store=False
        )
        items += [item.to_dict() for item in one.output]
        items.append(
            {
                "type": "function_call_output",
                "call_id": items[-1]["call_id"],
                "output": "sunny",
            }
        )
        await client.responses.create(model="assistant", input=items, tools=[TOOL], store=False)

    first, second = world.interactions
    assert second.parent_id == first.interaction_id


async def test_a_stored_response_survives_a_restart(
    chatml: TemplateRenderer, tmp_path: Path
) -> None:
    path = tmp_path / "responses.sqlite"

    def opened() -> SqliteResponseStore:
        return SqliteResponseStore(path, ResponsesConfig(), timeout_s=5.0)

    store = opened()
    async with serving(chatml, CALL, responses=store) as world:
        asked: dict[str, Any] = {"model": "assistant", "tools": [TOOL]}
        one = await openai_client(world).responses.create(input="Weather?", **asked)
        session_id = world.interactions[0].session_id
    await store.close()
    store = opened()
    async with serving(chatml, "It is sunny.", responses=store) as world:
        client = openai_client(world)
        call = one.output[-1]
        assert call.type == "function_call"
        output: ResponseInputItemParam = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": "sunny",
        }
        two = await client.responses.create(input=[output], previous_response_id=one.id, **asked)
        read = await client.responses.retrieve(one.id)
    await store.close()

    assert two.output_text == "It is sunny."
    assert world.interactions[0].session_id == session_id
    assert read == one


async def test_no_tenant_reads_deletes_or_goes_on_from_anothers(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "A") as world:
        response = await openai_client(world).responses.create(model="assistant", input="Hi")
        other = openai_client(world, key=OTHER_KEY)

        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.input_items.list(response.id)
        with pytest.raises(openai.BadRequestError, match="no stored response"):
            await other.responses.create(
                model="assistant", input="Hi", previous_response_id=response.id
            )
        same_tenant = openai_client(world, key=LOG_KEY)
        assert (await same_tenant.responses.retrieve(response.id)).id == response.id


async def test_a_deleted_response_is_gone(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "A") as world:
        client = openai_client(world)
        response = await client.responses.create(model="assistant", input="Hi")
        await client.responses.delete(response.id)

        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="deleted or has expired"):
            await client.responses.create(
                model="assistant", input="Hi", previous_response_id=response.id
            )


async def test_input_items_are_all_that_a_response_was_made_from(
    chatml: TemplateRenderer,
) -> None:
    async with serving(chatml, "A") as world:
        client = openai_client(world)
        one = await client.responses.create(model="assistant", input="One")
        two = await client.responses.create(
            model="assistant", input="Two", previous_response_id=one.id
        )
        newest = await client.responses.input_items.list(two.id, limit=1)
        rest = [item async for item in await client.responses.input_items.list(two.id, order="asc")]

    assert [item.to_dict()["content"][0]["text"] for item in newest.data] == ["Two"]  # type: ignore[index]
    assert newest.has_more
    assert [item.to_dict()["content"][0]["text"] for item in rest] == ["One", "A", "Two"]  # type: ignore[index]


@pytest.mark.parametrize("limit", ["0", "101", "-1", "1.0", "\u00b2", "9" * 5000, ""])
async def test_a_page_has_1_to_100_items(chatml: TemplateRenderer, limit: str) -> None:
    async with serving(chatml, "A") as world:
        client = openai_client(world)
        response = await client.responses.create(model="assistant", input="One")
        with pytest.raises(openai.BadRequestError, match="limit: give 1 to 100"):
            await client.responses.input_items.list(response.id, extra_query={"limit": limit})


@pytest.mark.parametrize("given", [{}, {"id": None}, {"id": ""}])
async def test_an_input_item_without_an_id_is_given_one(
    chatml: TemplateRenderer, given: dict[str, Any]
) -> None:
    item: Any = {"role": "user", "content": "One", **given}
    async with serving(chatml, "A") as world:
        client = openai_client(world)
        response = await client.responses.create(model="assistant", input=[item])
        (listed,) = (await client.responses.input_items.list(response.id)).data

    assert listed.id == f"in_{response.id.removeprefix('resp_')}_0"


async def test_an_answer_at_its_bound_is_incomplete(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "One two three four five six.") as world:
        client = openai_client(world)
        asked: dict[str, Any] = {"model": "assistant", "input": "Hi", "max_output_tokens": 2}
        whole = await client.responses.create(**asked)
        stream = await client.responses.create(stream=True, **asked)
        events = [event async for event in stream]

    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"


async def test_a_stream_that_breaks_ends_with_the_failed_response(
    chatml: TemplateRenderer,
) -> None:
    async with serving(chatml, "One two three four five six.") as world:
        world.engine.hold_at = 2
        stream = await _until_held(world)
        events = [event async for event in stream]

    assert [event.type for event in events[-2:]] == ["error", "response.failed"]


async def _until_held(world: World) -> Any:
    import asyncio

    client = openai_client(world)
    asked = asyncio.create_task(client.responses.create(model="assistant", input="Hi", stream=True))
    while not world.engine.requests:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    world.engine.failure = EngineAborted("the engine went away")
    return await asked


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": "resp_nobody"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ],
)
async def test_what_is_not_supported_is_a_clear_400(
    chatml: TemplateRenderer, asked: dict[str, Any], param: str
) -> None:
    async with serving(chatml, "A") as world:
        client = openai_client(world)

        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "assistant", "input": "Hi", **asked})
        assert caught.value.param == param


async def test_feedback_is_sent_by_the_clients_own_post(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "A") as world:
        client = openai_client(world)
        response = await client.responses.create(model="assistant", input="Hi")
        interaction_id = response.id.removeprefix("resp_")
        body = {"interaction_id": interaction_id, "metric": "accepted", "value": True}
        await client.post("/feedback", body=body, cast_to=object)

    assert [row.interaction_id for row in world.feedback] == [interaction_id]
    assert world.interactions[0].interaction_id == interaction_id


async def test_an_unknown_key_is_refused_on_every_route(chatml: TemplateRenderer) -> None:
    async with serving(chatml, "A") as world:
        client = openai_client(world, key="nobody's")

        with pytest.raises(openai.AuthenticationError):
            await client.responses.create(model="assistant", input="Hi")
        with pytest.raises(openai.AuthenticationError):
            await client.responses.retrieve("resp_1")
        with pytest.raises(openai.AuthenticationError):
            await client.responses.input_items.list("resp_1")
