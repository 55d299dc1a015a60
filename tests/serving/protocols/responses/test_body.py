"""Parameters of the responses protocol, supported and refused."""

from typing import Any

import pytest

from onlinerl.errors import RequestRefused
from onlinerl.serving.interaction.request import JsonFormat, Tool, ToolChoice
from onlinerl.serving.protocols.responses.body import (
    ResponsesBody,
    read_body,
    tool_choice_of,
    tools_of,
)
from tests.serving.protocol_cases import WEATHER

FUNCTION = {"type": "function", "name": "weather", "parameters": WEATHER}


def read(**body: Any) -> ResponsesBody:
    return read_body({"model": "assistant", "input": "Hi", **body})


def choice(**body: Any) -> ToolChoice:
    checked = read(**{"tools": [FUNCTION], **body})
    return tool_choice_of(checked, tools_of(checked))


def refusal(**body: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        choice(**body)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        {"background": False},
        {"conversation": None},
        {"include": []},
        {"max_tool_calls": None},
        {"metadata": None},
        {"moderation": None},
        {"prompt": None},
        {"prompt_cache_retention": "in_memory"},
        {"reasoning": None},
        {"reasoning": {"effort": None, "summary": "auto"}},
        {"service_tier": "auto"},
        {"stream_options": {"include_obfuscation": False}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"tool_choice": None},
        {"truncation": "disabled"},
    ],
)
def test_values_without_effect_are_accepted(body: dict[str, Any]) -> None:
    assert read(**body).input == "Hi"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"n": 2}, "n"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"seed": 1}, "seed"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stop": ["x"]}, "stop"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"temperature": 2.5}, "temperature"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [FUNCTION | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools.1.name"),
        ({"tools": [FUNCTION | {"name": "a b"}]}, "tools.0.name"),
        ({"tools": [FUNCTION, {"type": "web_search"}]}, "tools.1.type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools.0.type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_p": 0.0}, "top_p"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refusal(**body).param == param


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(RequestRefused, match="must be a JSON object"):
        read_body([])


def test_a_function_is_a_tool() -> None:
    plain, strict = tools_of(read(tools=[FUNCTION, {**FUNCTION, "name": "b", "strict": True}]))

    assert plain == Tool(name="weather", parameters=WEATHER)
    assert strict == Tool(name="b", parameters=WEATHER, strict=True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, ToolChoice(mode="auto")),
        ({"tool_choice": "none"}, ToolChoice(mode="none")),
        ({"tool_choice": "required"}, ToolChoice(mode="required")),
        (
            {"tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False},
            ToolChoice(mode="required", name="weather", parallel=False),
        ),
    ],
)
def test_tool_choices(body: dict[str, Any], expected: ToolChoice) -> None:
    assert choice(**body) == expected


@pytest.mark.parametrize(("effort", "thinking"), [(None, None), ("none", False)])
def test_no_effort_is_no_thinking(effort: str | None, thinking: bool) -> None:
    assert read(reasoning={"effort": effort}).thinking is thinking


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, JsonFormat()),
        (
            {"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}},
            JsonFormat(schema=WEATHER),
        ),
    ],
)
def test_json_formats(text: dict[str, Any], expected: JsonFormat | None) -> None:
    assert read(text=text).json_format == expected


@pytest.mark.parametrize(
    ("body", "alternatives"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 3}, 3),
    ],
)
def test_logprobs_are_shown_on_request(body: dict[str, Any], alternatives: int | None) -> None:
    assert read(**body).num_alternatives == alternatives
