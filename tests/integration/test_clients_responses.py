"""The OpenAI client and the Agents SDK on the responses protocol, before a real engine."""

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)

from tests.integration.gateway_service import Service
from tests.serving.world import KEY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Basel"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {"model": "assistant", "input": "Weather?", "max_output_tokens": 40}
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]


@pytest.fixture
async def client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{service.url}/v1", max_retries=0) as made:
        yield made


async def test_streamed_equals_whole_under_greedy_sampling(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    whole = await client.responses.create(temperature=0, **ASKED)
    stream = await client.responses.create(temperature=0, stream=True, **ASKED)
    events = [event async for event in stream]

    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text
    for row, response in zip(await service.logged(2), (whole, last.response), strict=True):
        assert response.usage is not None
        assert response.usage.input_tokens == len(row.prompt_token_ids)
        assert response.usage.output_tokens == len(row.choices[0].completion_token_ids)


async def test_a_required_call_and_its_result_extend_one_session(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    async with client.responses.stream(
        **{**ASKED, "max_output_tokens": 200},
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        one = await stream.get_final_response()
    (call,) = [item for item in one.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Bern", "Basel")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    two = await client.responses.create(
        **{**ASKED, "input": [result]}, tools=TOOLS, previous_response_id=one.id
    )

    first, second = await service.logged(2)
    assert two.previous_response_id == one.id
    assert second.parent_id == first.interaction_id
    assert second.session_id == first.session_id
    assert second.prefix_length == len(first.prompt_token_ids) + len(
        first.choices[0].completion_token_ids
    )
    assert (first.trainable, second.trainable) == (False, True)


async def test_a_schema_is_obeyed(client: openai.AsyncOpenAI) -> None:
    # Not an object: a random model fills the blanks that JSON allows in it until its bound.
    city = {"enum": ["Bern", "Basel"]}
    form: Any = {"type": "json_schema", "name": "city", "schema": city, "strict": True}
    response = await client.responses.create(text={"format": form}, **ASKED)

    assert json.loads(response.output_text) in ("Bern", "Basel")


@pytest.mark.parametrize("make_model", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_an_agent_that_has_to_call_its_tool_does(
    service: Service,
    client: openai.AsyncOpenAI,
    make_model: type[OpenAIChatCompletionsModel | OpenAIResponsesModel],
) -> None:
    cities: list[str] = []

    @function_tool(strict_mode=False)
    def weather(city: Literal["Bern", "Basel"]) -> str:
        """Looks out of the window."""
        cities.append(city)
        return "sunny"

    # It ends with the call: a random model goes on until its bound, which the SDK takes for an
    # error of this protocol.
    agent = Agent(
        name="Forecaster",
        model=make_model(model="assistant", openai_client=client),
        tools=[weather],
        tool_use_behavior="stop_on_first_tool",
        model_settings=ModelSettings(
            tool_choice="required", max_tokens=200, parallel_tool_calls=False
        ),
    )
    result = await Runner.run(agent, "Weather?", run_config=RunConfig(tracing_disabled=True))

    assert result.final_output == "sunny"
    assert set(cities) <= {"Bern", "Basel"}
    (row,) = await service.logged(1)
    assert row.choices[0].finish_reason == "tool_calls"
