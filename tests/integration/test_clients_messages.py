"""The Anthropic client before a real engine."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.integration.gateway_service import Service
from tests.integration.test_clients_responses import CITY
from tests.serving.world import KEY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ASKED: dict[str, Any] = {
    "model": "assistant",
    "max_tokens": 40,
    "messages": [{"role": "user", "content": "Weather?"}],
}
TOOLS: list[Any] = [{"name": "weather", "input_schema": CITY}]


@pytest.fixture
async def client(service: Service) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(api_key=KEY, base_url=service.url, max_retries=0) as made:
        yield made


async def test_streamed_equals_whole_under_greedy_sampling(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    greedy: dict[str, Any] = {**ASKED, "extra_body": {"temperature": 0}}
    whole = await client.messages.create(**greedy)
    async with client.messages.stream(**greedy) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()

    assert len(texts) > 1
    assert "".join(texts) == whole.content[0].to_dict()["text"]
    assert final.content[0].to_dict()["text"] == "".join(texts)
    assert final.stop_reason == whole.stop_reason
    for row, message in zip(await service.logged(2), (whole, final), strict=True):
        assert message.usage.input_tokens == len(row.prompt_token_ids)
        assert message.usage.output_tokens == len(row.choices[0].completion_token_ids)


async def test_a_required_call_and_its_result_extend_one_session(
    service: Service, client: anthropic.AsyncAnthropic
) -> None:
    async with client.messages.stream(
        **{**ASKED, "max_tokens": 200},
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        one = await stream.get_final_message()
    (call,) = [block for block in one.content if block.type == "tool_use"]
    assert one.stop_reason == "tool_use"
    assert call.input["city"] in ("Bern", "Basel")
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages: list[Any] = [
        *ASKED["messages"],
        one.to_param(),
        {"role": "user", "content": [result]},
    ]
    count = await client.messages.count_tokens(model="assistant", messages=messages, tools=TOOLS)
    two = await client.messages.create(**{**ASKED, "messages": messages}, tools=TOOLS)

    first, second = await service.logged(2)
    assert second.parent_id == first.interaction_id
    assert second.prefix_length == len(first.prompt_token_ids) + len(
        first.choices[0].completion_token_ids
    )
    assert count.input_tokens == two.usage.input_tokens
