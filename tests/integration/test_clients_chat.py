"""The OpenAI client on chat completions and completions, before a real engine."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import aiohttp
import openai
import pydantic
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from onlinerl.rollout_store.schema import InteractionEvent
from tests.integration.engines import Engine
from tests.integration.gateway_service import Service
from tests.serving.world import KEY

pytestmark = [pytest.mark.integration, pytest.mark.asyncio, pytest.mark.timeout(600)]

ENOUGH_FOR_CALLS = 600
"""Tokens: a model of random weights decides after every call whether to make another."""

QUESTION: Any = {"role": "user", "content": "Weather?"}
CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Basel"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": CITY}}


class Place(pydantic.BaseModel):
    """What a client parses an answer into."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: str = pydantic.Field(pattern="^(Bern|Basel)$")
    rainy: bool


@pytest.fixture
async def client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{service.url}/v1", max_retries=0) as made:
        yield made


async def chat(client: openai.AsyncOpenAI, **options: Any) -> ChatCompletion:
    asked: dict[str, Any] = {"messages": [QUESTION], "max_tokens": 60, "seed": 5}
    create: Any = client.chat.completions.create
    answer: ChatCompletion = await create(model="assistant", **(asked | options))
    return answer


def decoded(service: Service, row: InteractionEvent, *, choice: int = 0) -> str:
    return service.gateway.renderer.decode(row.choices[choice].completion_token_ids)


# Calls


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "forecast"}),
        ({"type": "function", "function": {"name": "forecast"}}, {"forecast"}),
    ],
)
async def test_forced_calls_are_valid_whatever_the_weights(
    service: Service, client: openai.AsyncOpenAI, choice: Any, names: set[str]
) -> None:
    answer = await chat(
        client,
        tools=[tool("weather"), tool("forecast")],
        tool_choice=choice,
        max_tokens=ENOUGH_FOR_CALLS,
    )

    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert calls
    called = []
    for call in calls:
        assert call.type == "function"
        called.append(call.function.name)
        assert call.function.name in names
        assert json.loads(call.function.arguments)["city"] in ("Bern", "Basel")
    (row,) = await service.logged(1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(row.choices[0].completion_token_ids)
    assert all(name in decoded(service, row) for name in called)
    assert "structured output" in (row.untrainable_reason or "")


async def test_a_streamed_call_is_put_together_by_the_client(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    async with client.chat.completions.stream(
        model="assistant",
        messages=[QUESTION],
        tools=[tool("weather")],
        tool_choice="required",
        max_tokens=ENOUGH_FOR_CALLS,
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()

    (message,) = [choice.message for choice in final.choices]
    assert message.tool_calls
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done[0].name == "weather"
    assert json.loads(done[0].arguments) == json.loads(message.tool_calls[0].function.arguments)
    await service.logged(1)


async def test_one_call_at_most_where_the_client_wants_no_more(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    answer = await chat(
        client,
        tools=[tool("weather")],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=ENOUGH_FOR_CALLS,
    )

    assert len(answer.choices[0].message.tool_calls or []) == 1
    await service.logged(1)


async def test_results_extend_the_call_and_the_client_echoes_what_it_got(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    tools = [tool("weather")]
    first = await chat(client, tools=tools, tool_choice="required", max_tokens=ENOUGH_FOR_CALLS)
    message: ChatCompletionMessage = first.choices[0].message
    assert message.tool_calls
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny"} for call in message.tool_calls
    ]
    await chat(client, messages=[QUESTION, message, *results], tools=tools, max_tokens=8)
    one, two = await service.logged(2)

    assert (two.parent_id, two.session_id) == (one.interaction_id, one.session_id)
    known = len(one.prompt_token_ids) + len(one.choices[0].completion_token_ids)
    assert two.prefix_length == known
    assert "Sunny" in service.gateway.renderer.decode(two.prompt_token_ids)
    assert two.trainable, two.untrainable_reason


async def test_the_agents_sdk_runs_tools(service: Service, client: openai.AsyncOpenAI) -> None:
    asked = []

    @function_tool
    def weather(city: Literal["Bern", "Basel"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "Sunny"

    agent = Agent(
        name="guide",
        tools=[weather],
        tool_use_behavior="stop_on_first_tool",
        model=OpenAIChatCompletionsModel(model="assistant", openai_client=client),
        model_settings=ModelSettings(tool_choice="required", max_tokens=ENOUGH_FOR_CALLS),
    )
    result = await Runner.run(agent, "Weather?", run_config=RunConfig(tracing_disabled=True))

    assert asked
    assert result.final_output == "Sunny"
    await service.logged(1)


# Formats


async def test_an_answer_in_a_schema_is_parsed_by_the_client(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    """Random weights may write space for long, which JSON allows: some answers are cut."""
    parsed = []
    for seed in range(8):
        with contextlib.suppress(openai.LengthFinishReasonError):
            answer = await client.chat.completions.parse(
                model="assistant",
                messages=[QUESTION],
                response_format=Place,
                max_tokens=400,
                seed=seed,
                temperature=2,
            )
            parsed.append(answer.choices[0].message)
    rows = await service.logged(8)

    assert parsed
    assert all(isinstance(message.parsed, Place) for message in parsed)
    assert {message.content for message in parsed} <= {decoded(service, row) for row in rows}
    assert all("structured output" in (row.untrainable_reason or "") for row in rows)


async def test_a_schema_is_obeyed_whatever_the_weights(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    schema = {"name": "city", "schema": {"enum": ["Bern", "Basel"]}}
    form = {"type": "json_schema", "json_schema": schema}
    for seed in range(4):
        answer = await chat(client, response_format=form, seed=seed)
        assert json.loads(answer.choices[0].message.content or "") in ("Bern", "Basel")
        assert answer.choices[0].finish_reason == "stop"

    await service.logged(4)


async def test_a_json_object_begins_as_one(service: Service, client: openai.AsyncOpenAI) -> None:
    answer = await chat(client, response_format={"type": "json_object"}, max_tokens=20)

    assert (answer.choices[0].message.content or "").lstrip().startswith("{")
    await service.logged(1)


async def test_a_schema_that_the_engine_cannot_enforce_is_a_400(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    schema = {"name": "odd", "schema": {"type": "no such type"}}
    with pytest.raises(openai.BadRequestError):
        await chat(client, response_format={"type": "json_schema", "json_schema": schema})

    assert service.sink.records == []
    assert service.gateway.pool.versions() == ["assistant/1"]


# Log-probabilities


@pytest.mark.parametrize("num_top", [0, 3, 20])
async def test_logprobs_are_those_that_are_logged(
    service: Service, client: openai.AsyncOpenAI, num_top: int
) -> None:
    answer = await chat(client, logprobs=True, top_logprobs=num_top, max_tokens=12)
    (row,) = await service.logged(1)

    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert [token.logprob for token in tokens] == pytest.approx(row.choices[0].logprobs)
    for token in tokens:
        tops = [each.logprob for each in token.top_logprobs]
        assert len(tops) == num_top
        assert tops == sorted(tops, reverse=True)
        if tops:
            assert token.logprob <= tops[0] + 1e-4
    told = b"".join(bytes(token.bytes or []) for token in tokens)
    assert (answer.choices[0].message.content or "") in told.decode(errors="replace")


async def test_streamed_logprobs_are_those_of_the_whole_answer(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    whole = await chat(client, logprobs=True, temperature=0)
    stream: Any = await chat(client, logprobs=True, temperature=0, stream=True)
    streamed = [
        token
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]
    await service.logged(2)

    assert whole.choices[0].logprobs is not None
    assert [token.token for token in streamed] == [
        token.token for token in whole.choices[0].logprobs.content or []
    ]


# Sampling


@pytest.mark.parametrize(
    "changes",
    [{"frequency_penalty": 1.5}, {"presence_penalty": -1.0}, {"logit_bias": {"28": -100}}],
)
async def test_shaped_distributions_are_served_and_not_learned_from(
    service: Service, client: openai.AsyncOpenAI, changes: dict[str, Any]
) -> None:
    await chat(client, **changes)
    (row,) = await service.logged(1)

    (name,) = changes
    assert (row.untrainable_reason or "").startswith(name)
    if name == "logit_bias":
        assert 28 not in row.choices[0].completion_token_ids


async def test_a_seed_gives_the_same_answer_twice(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    for _ in range(2):
        await chat(client, seed=11)
    one, two = await service.logged(2)

    assert one.choices[0].completion_token_ids == two.choices[0].completion_token_ids


async def test_the_prefix_cache_is_told(service: Service, client: openai.AsyncOpenAI) -> None:
    long = {"role": "user", "content": "Which way is it to the station? " * 20}
    usages = [(await chat(client, messages=[long], max_tokens=4)).usage for _ in range(2)]
    await service.logged(2)

    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    cached = [detail.cached_tokens for detail in details if detail is not None]
    assert len(cached) == 2
    assert (cached[1] or 0) >= 64
    assert usages[0] is not None
    assert (cached[1] or 0) <= usages[0].prompt_tokens


# Completions


async def test_a_raw_prompt_is_continued_and_trainable(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    whole = await client.completions.create(
        model="assistant", prompt="Once upon", max_tokens=10, temperature=1, seed=3, logprobs=2
    )
    stream = await client.completions.create(
        model="assistant", prompt=[6403, 2076], max_tokens=10, temperature=1, seed=3, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    one, two = await service.logged(2)

    assert one.prompt_token_ids == service.gateway.renderer.tokenize("Once upon")
    assert two.prompt_token_ids == [6403, 2076]
    assert service.gateway.renderer.decode(two.choices[0].completion_token_ids) == text
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(one.choices[0].logprobs)
    assert all(len(top) == 2 for top in logprobs.top_logprobs or [] if top)
    for row in (one, two):
        assert (row.protocol, row.trainable) == ("openai.completions", True)


async def test_a_token_outside_the_vocabulary_keeps_the_engine_s_status(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="assistant", prompt=[10**6], max_tokens=4)

    assert service.sink.records == []


# Updates


async def test_an_answer_that_an_update_aborts_goes_on_with_the_new_version(
    service: Service, client: openai.AsyncOpenAI, shared_engine: Engine
) -> None:
    with shared_engine.paced(0.01):
        stream: Any = await chat(client, stream=True, max_tokens=120, stop=["never said"])
        chunks = []
        async with aiohttp.ClientSession(shared_engine.url) as admin:
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 10:
                    await admin.post("/pause?mode=abort")
                    await admin.post("/update_weight_version", json={"new_version": "assistant/2"})
                    await admin.post("/resume")
    (row,) = await service.logged(1)

    (choice,) = row.choices
    assert choice.finish_reason in ("length", "stop")
    assert [span.version for span in choice.version_spans] == ["assistant/1", "assistant/2"]
    assert row.trainable, row.untrainable_reason
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert service.gateway.renderer.decode(choice.completion_token_ids) == text
