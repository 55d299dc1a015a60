"""Anthropic's protocol as a wire, written out by hand."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import EngineAborted, RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome, Piece
from onlinerl.serving.interaction.request import (
    Conversation,
    JsonFormat,
    Message,
    Request,
    Tool,
    ToolChoice,
)
from onlinerl.serving.protocols.messages.messages import sign
from onlinerl.serving.protocols.messages.output import MessagesWriter
from onlinerl.serving.protocols.messages.output_blocks import ContentBlocks
from onlinerl.serving.protocols.messages.protocol import MessagesWire, read_count_request
from tests.serving.protocol_cases import (
    SOURCE,
    WEATHER,
    asked,
    called,
    events,
    exchange,
    outcome,
    said,
    streamed,
    thought,
)

WIRE = MessagesWire()
TOOL = {"name": "weather", "description": "Looks.", "input_schema": WEATHER}
USER = [{"role": "user", "content": "Hi"}]


async def read(**body: Any) -> Request:
    given_body = {"model": "assistant", "max_tokens": 9, "messages": USER, **body}
    return await WIRE.read(asked(given_body))


async def refusal(**body: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        await read(**body)
    assert caught.value.status == 400
    assert caught.value.param is not None
    return caught.value


def served() -> Exchange:
    return exchange(
        Request(
            protocol="anthropic.messages",
            model="assistant",
            prompt=Conversation(messages=(Message(role="user", content="Hi"),)),
            sampling=Sampling(max_tokens=9),
        )
    )


def whole_of(ended: Outcome) -> dict[str, Any]:
    return WIRE.whole(served(), [ended])


def stream_of(ended: Outcome) -> list[dict[str, Any]]:
    return streamed(MessagesWriter(served()), ended)


async def test_a_body_is_a_request() -> None:
    request = await read(
        system="Be brief.",
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        metadata={"user_id": "ann"},
        thinking={"type": "enabled", "budget_tokens": 8},
        stream=True,
    )

    assert request == Request(
        protocol="anthropic.messages",
        model="assistant",
        prompt=Conversation(
            messages=(
                Message(role="system", content="Be brief."),
                Message(role="user", content="Hi"),
            ),
            tools=(Tool(name="weather", description="Looks.", parameters=WEATHER),),
            thinking=True,
        ),
        sampling=Sampling(temperature=0.5, top_k=7, top_p=0.9, max_tokens=9, stop=["END"]),
        stream=True,
        tool_choice=ToolChoice(mode="required", name="weather", parallel=False),
        user="ann",
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "none"}, ToolChoice(mode="none")),
        ({"type": "any"}, ToolChoice(mode="required")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
    ],
)
async def test_tool_choices(choice: object, expected: ToolChoice) -> None:
    assert (await read(tools=[TOOL], tool_choice=choice)).tool_choice == expected


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, None),
        ({"type": "disabled"}, False),
        ({"type": "enabled"}, True),
        ({"type": "adaptive"}, None),
    ],
)
async def test_thinking_is_passed_on(thinking: object, expected: bool | None) -> None:
    prompt = (await read(thinking=thinking)).prompt

    assert isinstance(prompt, Conversation)
    assert prompt.thinking is expected


async def test_a_schema_of_the_output_is_a_format() -> None:
    output = {"format": {"type": "json_schema", "schema": WEATHER}}

    assert (await read(output_config=output)).format == JsonFormat(schema=WEATHER)


@pytest.mark.parametrize(
    "body",
    [
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"container": None},
        {"mcp_servers": []},
        {"service_tier": "standard_only"},
        {"stop_sequences": []},
        {"system": None},
        {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom"}]},
        {"tools": [{**TOOL, "eager_input_streaming": True}]},
    ],
)
async def test_values_without_effect_are_accepted(body: dict[str, Any]) -> None:
    assert (await read(**body)).model == "assistant"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"metadata": {"session": "x"}}, "metadata.session"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": 0.001}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0.input_examples"),
        ({"top_k": -1}, "top_k"),
    ],
)
async def test_unsupported_parameters_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert (await refusal(**body)).param == param


def test_an_answer_is_streamed_block_by_block() -> None:
    ended = outcome(
        thought("Two"),
        thought(" cities."),
        said("Let me"),
        said(" look."),
        *called(0, "weather", '{"city":', ' "Bern"}'),
        finish="tool_calls",
    )

    assert stream_of(ended) == [
        {
            "type": "message_start",
            "message": {
                "id": f"msg_{SOURCE}",
                "type": "message",
                "role": "assistant",
                "model": "assistant",
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": 3, "output_tokens": 0},
            },
        },
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, {"type": "thinking_delta", "thinking": "Two"}),
        delta(0, {"type": "thinking_delta", "thinking": " cities."}),
        delta(0, {"type": "signature_delta", "signature": sign("Two cities.")}),
        stop(0),
        start(1, {"type": "text", "text": ""}),
        delta(1, {"type": "text_delta", "text": "Let me"}),
        delta(1, {"type": "text_delta", "text": " look."}),
        stop(1),
        start(2, {"type": "tool_use", "id": "call_0", "name": "weather", "input": {}}),
        delta(2, {"type": "input_json_delta", "partial_json": '{"city": "Bern"}'}),
        stop(2),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"input_tokens": 3, "output_tokens": 7},
        },
        {"type": "message_stop"},
    ]


def test_a_whole_answer_has_the_same_blocks() -> None:
    ended = outcome(thought("Hm."), *called(0, "weather", '{"city": "Bern"}'), finish="tool_calls")
    message = whole_of(ended)

    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": sign("Hm.")},
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Bern"}},
    ]
    assert message["usage"] == {"input_tokens": 3, "output_tokens": 7}


def test_an_event_does_not_change_with_its_block() -> None:
    blocks = ContentBlocks()
    (started, _) = blocks.add(said("Click"))
    blocks.close()

    assert started["content_block"] == {"type": "text", "text": ""}


@pytest.mark.parametrize(
    ("finish", "stop_string", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("tool_calls", None, "tool_use", None),
        ("tool_calls", "END", "tool_use", None),
    ],
)
def test_stop_reasons(
    finish: str, stop_string: str | None, reason: str, sequence: str | None
) -> None:
    message = whole_of(outcome(said("x"), finish=finish, stop_string=stop_string))

    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_call_without_arguments_has_an_empty_input() -> None:
    ended = outcome(*called(0, "weather"), finish="tool_calls")

    assert whole_of(ended)["content"][0]["input"] == {}
    assert delta(0, {"type": "input_json_delta", "partial_json": "{}"}) in stream_of(ended)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_are_in_anthropics_envelope(status: int, kind: str) -> None:
    error = WIRE.error(RequestRefused("no", status))

    assert error == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    writer = MessagesWriter(served())
    data = writer.open() + writer.write(said("x")) + writer.fail(EngineAborted("gone"))

    assert events(data)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "gone"},
    }


def test_counting_accepts_only_parameters_that_shape_the_prompt() -> None:
    counted = read_count_request({"model": "m", "messages": USER, "tools": [TOOL]})

    assert isinstance(counted.prompt, Conversation)
    assert (counted.model, len(counted.prompt.tools)) == ("m", 1)
    with pytest.raises(RequestRefused, match="max_tokens"):
        read_count_request({"model": "m", "messages": USER, "max_tokens": 5})


@st.composite
def answers(draw: st.DrawFn) -> list[Piece]:
    pieces: list[Piece] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call"]), max_size=8)):
        text = draw(st.text(max_size=5))
        if kind == "text":
            pieces.append(said(text))
        elif kind == "thought":
            pieces.append(thought(text))
        else:
            cut = draw(st.integers(0, 10))
            whole = json.dumps({"city": text})
            pieces += called(num_calls, "weather", whole[:cut], whole[cut:])
            num_calls += 1
    return pieces


@given(pieces=answers())
def test_a_streamed_answer_is_the_whole_one_in_blocks_of_one_kind(pieces: Sequence[Piece]) -> None:
    ended = outcome(*pieces)
    started, *middle, _, stopped = stream_of(ended)
    blocks: list[dict[str, Any]] = []
    inputs: list[str] = []
    for event in middle:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            add(blocks[-1], event["delta"], inputs)
        else:
            assert event == stop(len(blocks) - 1)

    assert (started["type"], stopped["type"]) == ("message_start", "message_stop")
    assert blocks == whole_of(ended)["content"]
    assert len(inputs) == len(ended.tool_calls)


def add(block: dict[str, Any], change: dict[str, Any], inputs: list[str]) -> None:
    """Apply a delta as a client does."""
    kind = change["type"]
    if kind == "input_json_delta":
        inputs.append(change["partial_json"])
        block["input"] = json.loads(change["partial_json"])
    elif kind == "signature_delta":
        block["signature"] = change["signature"]
    else:
        field = kind.removesuffix("_delta")
        assert block["type"] == field
        block[field] += change[field]


def start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, change: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": change}


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}
