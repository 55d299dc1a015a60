"""The OpenAI Agents SDK runs a loop with tools against a gateway in this process."""

from collections.abc import Callable
from typing import Any

import pytest
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    function_tool,
)
from agents.models.interface import Model
from pydantic import BaseModel

from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.clients import CALL, THOUGHT, openai_client, serving
from tests.serving.world import World

MakeModel = Callable[[World], Model]


def over_chat(world: World) -> Model:
    return OpenAIChatCompletionsModel(model="assistant", openai_client=openai_client(world))


def over_responses(world: World) -> Model:
    return OpenAIResponsesModel(model="assistant", openai_client=openai_client(world))


both_protocols = pytest.mark.parametrize("make_model", [over_chat, over_responses])
RUN = RunConfig(tracing_disabled=True)


@pytest.fixture
def cities() -> list[str]:
    """What the tool was asked for."""
    return []


def forecaster(model: Model, cities: list[str]) -> Agent[Any]:
    @function_tool(strict_mode=False)
    def weather(city: str) -> str:
        """Looks out of the window."""
        cities.append(city)
        return "sunny"

    # The model is given here: an agent without one gets settings of OpenAI's default model.
    return Agent(name="Forecaster", model=model, instructions="Be brief.", tools=[weather])


def check_loop(world: World, cities: list[str], result: Any) -> None:
    assert cities == ["Bern"]
    assert result.final_output == "It is sunny."
    first, second = world.interactions
    assert second.parent_id == first.interaction_id
    assert second.prefix_length == len(first.prompt_token_ids) + len(
        first.choices[0].completion_token_ids
    )
    assert [row.trainable for row in world.interactions] == [True, True]


@both_protocols
async def test_an_agent_calls_its_tool_and_answers(
    chatml: TemplateRenderer, cities: list[str], make_model: MakeModel
) -> None:
    async with serving(chatml, "Let me look." + CALL, "It is sunny.") as world:
        agent = forecaster(make_model(world), cities)
        result: RunResult = await Runner.run(agent, "Weather in Bern?", run_config=RUN)

        check_loop(world, cities, result)


@both_protocols
async def test_a_streamed_agent_calls_its_tool_and_answers(
    chatml: TemplateRenderer, cities: list[str], make_model: MakeModel
) -> None:
    async with serving(chatml, THOUGHT + CALL, "It is sunny.") as world:
        agent = forecaster(make_model(world), cities)
        result = Runner.run_streamed(agent, "Weather in Bern?", run_config=RUN)
        kinds = [event.type async for event in result.stream_events()]

        check_loop(world, cities, result)
    assert "run_item_stream_event" in kinds


async def test_an_agent_goes_on_from_stored_responses(
    chatml: TemplateRenderer, cities: list[str]
) -> None:
    async with serving(chatml, THOUGHT + CALL, "It is sunny.") as world:
        agent = forecaster(over_responses(world), cities)
        result = await Runner.run(
            agent, "Weather in Bern?", run_config=RUN, auto_previous_response_id=True
        )

        check_loop(world, cities, result)
        sent = world.engine.requests[1].token_ids
    assert list(sent[: len(world.engine.requests[0].token_ids)]) == list(
        world.engine.requests[0].token_ids
    )


class Forecast(BaseModel):
    sunny: bool


@both_protocols
async def test_an_agent_with_an_output_type_gets_it(
    chatml: TemplateRenderer, make_model: MakeModel
) -> None:
    async with serving(chatml, '{"sunny": true}') as world:
        agent = Agent(
            name="Forecaster",
            model=make_model(world),
            output_type=AgentOutputSchema(Forecast),
            model_settings=ModelSettings(max_tokens=50),
        )
        result = await Runner.run(agent, "Weather?", run_config=RUN)

    assert result.final_output == Forecast(sunny=True)
    assert "json" in world.engine.requests[0].sampling["structured_outputs"]  # type: ignore[operator]
