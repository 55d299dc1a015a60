from dataclasses import replace
from typing import Any

import pytest

from onlinerl.errors import RequestRefused
from onlinerl.serving.config import GatewayConfig, LimitsConfig
from onlinerl.serving.interaction.request import (
    Conversation,
    JsonFormat,
    Message,
    Request,
    Tool,
    ToolCall,
    ToolChoice,
)
from onlinerl.serving.protocols.chat.protocol import read_request

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": WEATHER}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"}


def parse(**changes: Any) -> Request:
    body = {"model": "assistant", "messages": [USER], **changes}
    return read_request(body, config=GatewayConfig(limits=LimitsConfig(max_choices=4)))


def conversation(**changes: Any) -> Conversation:
    prompt = parse(**changes).prompt
    assert isinstance(prompt, Conversation)
    return prompt


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"functions": [WEATHER]}, "functions"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"min_p": 0.1}, "min_p"),
        ({"store": True}, "store"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "mp3"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"a_new_parameter": 1}, "a_new_parameter"),
        ({"messages": [{**USER, "name": "ada"}]}, "messages.0.name"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**changes)

    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 5}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": ["Hi"]}, "messages.0"),
        ({"messages": [USER, RESULT]}, "messages.1.tool_call_id"),
        ({"messages": [USER, CALLS, {**RESULT, "tool_call_id": "x"}]}, "messages.2.tool_call_id"),
        ({"messages": [USER, CALLS, {**RESULT, "name": "time"}]}, "messages.2.name"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"session_id": "a b"}}, "metadata.session_id"),
        ({"model": None}, "model"),
        ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "time"}}},
            "tool_choice",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**changes)

    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://localhost/"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_media_is_refused(part: dict[str, Any], role: str) -> None:
    with pytest.raises(RequestRefused, match="reads text only") as caught:
        parse(messages=[{"role": role, "content": [{"type": "text", "text": "x"}, part]}])

    assert caught.value.param == "messages.0.content.1.type"


def test_values_without_effect_are_accepted() -> None:
    plain = parse()

    assert plain == parse(
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        logprobs=False,
        top_logprobs=0,
        n=1,
        user=None,
        stop=None,
        parallel_tool_calls=True,
        store=False,
        reasoning_effort=None,
        verbosity="medium",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
    )


def test_a_safety_identifier_counts_unless_a_user_is_given() -> None:
    assert parse(safety_identifier="ada").user == "ada"
    assert parse(safety_identifier="hash", user="ada").user == "ada"


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    reply = {"role": "assistant", "content": "Yes", "refusal": None, "tool_calls": None}

    assert conversation(messages=[USER, reply, USER]).messages[1] == Message(
        role="assistant", content="Yes"
    )


def test_calls_their_results_and_reasoning_are_read() -> None:
    thinking = {**CALLS, "reasoning_content": "Rome?"}
    _, asked, told = conversation(messages=[USER, thinking, RESULT]).messages

    assert asked == Message(
        role="assistant",
        reasoning="Rome?",
        tool_calls=(ToolCall(id="call_1", name="weather", arguments='{"city": "Rome"}'),),
    )
    assert told == Message(role="tool", content="Sunny", tool_call_id="call_1", name="weather")


def test_fields_that_openais_client_adds_are_accepted() -> None:
    parsed = {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {}}}
    message = {**CALLS, "parsed": None, "audio": None, "tool_calls": [parsed]}

    assert conversation(messages=[USER, message, RESULT]) == conversation(
        messages=[USER, CALLS, RESULT]
    )


def test_tools_are_read() -> None:
    bare = {"type": "function", "function": {"name": "now", "strict": True}}

    assert conversation(tools=[TOOL, bare]).tools == (
        Tool(name="weather", description="Of a city", parameters=SCHEMA),
        Tool(name="now", strict=True),
    )


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        (
            {"type": "function", "function": {"name": "weather"}},
            ToolChoice(mode="required", name="weather"),
        ),
    ],
)
def test_the_choice_of_a_tool_is_read(given: object, choice: ToolChoice) -> None:
    assert parse(tools=[TOOL], tool_choice=given).tool_choice == choice
    one = parse(tools=[TOOL], tool_choice=given, parallel_tool_calls=False)
    assert one.tool_choice == replace(choice, parallel=False)


def test_formats_are_read() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}

    assert parse(response_format={"type": "text"}).format is None
    assert parse(response_format={"type": "json_object"}).format == JsonFormat()
    assert parse(response_format=schema).format == JsonFormat(schema=SCHEMA)


def test_thinking_is_left_to_the_model_or_switched() -> None:
    assert conversation().thinking is None
    assert conversation(reasoning_effort="none").thinking is False
    assert conversation(chat_template_kwargs={"enable_thinking": True}).thinking is True
    with pytest.raises(RequestRefused, match="enable_thinking"):
        parse(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    (message,) = conversation(messages=[{"role": "developer", "content": parts}]).messages
    assert message == Message(role="system", content="ab")


def test_both_names_of_the_token_bound_are_known() -> None:
    assert parse(max_tokens=3).sampling.max_tokens == 3
    assert parse(max_completion_tokens=4).sampling.max_tokens == 4
    assert parse(max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5


def test_sampling_parameters_are_passed_on() -> None:
    sampling = parse(temperature=0.7, top_p=0.9, top_k=-1, seed=3, stop="END").sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 0)
    assert (sampling.seed, sampling.stop) == (3, ["END"])
    assert sampling.model_extra == {}


def test_penalties_and_biases_are_kept_beside_the_declared_parameters() -> None:
    sampling = parse(frequency_penalty=0.5, presence_penalty=-1, logit_bias={"42": -100}).sampling

    assert sampling.model_extra == {
        "frequency_penalty": 0.5,
        "presence_penalty": -1.0,
        "logit_bias": {"42": -100.0},
    }


def test_alternatives_are_only_asked_for_with_logprobs() -> None:
    assert parse().top_logprobs is None
    assert parse(logprobs=True).top_logprobs == 0
    assert parse(logprobs=True, top_logprobs=3).top_logprobs == 3


def test_metadata_names_the_session_and_labels_the_row() -> None:
    request = parse(metadata={"session_id": "run-1", "plan": "pro"})

    assert request.session_id == "run-1"
    assert request.tags == {"session_id": "run-1", "plan": "pro"}
