from typing import Any

import pytest

from onlinerl.errors import RequestRefused
from onlinerl.serving.chat import ChatRequest, parse_chat
from onlinerl.serving.config import SamplingDefaults

USER = {"role": "user", "content": "Hi"}


def parse(**changes: Any) -> ChatRequest:
    body = {"model": "assistant", "messages": [USER], **changes}
    return parse_chat(body, defaults=SamplingDefaults(), max_choices=4)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"min_p": 0.1}, "min_p"),
        ({"store": True}, "store"),
        ({"a_new_parameter": 1}, "a_new_parameter"),
        ({"messages": [{**USER, "name": "ada"}]}, "messages.0.name"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
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
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": ["Hi"]}, "messages.0"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"model": None}, "model"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**changes)

    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_image_is_refused() -> None:
    part = {"type": "image_url", "image_url": {"url": "http://localhost/"}}

    with pytest.raises(RequestRefused, match=r"messages\.0\.content"):
        parse(messages=[{"role": "user", "content": [part]}])


def test_values_that_ask_for_nothing_are_allowed() -> None:
    plain = parse()

    assert plain == parse(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        frequency_penalty=0,
        logprobs=False,
        n=1,
        user=None,
        stop=None,
        parallel_tool_calls=True,
    )


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    reply = {"role": "assistant", "content": "Yes", "refusal": None, "tool_calls": None}

    assert parse(messages=[USER, reply, USER]).messages[1] == {
        "role": "assistant",
        "content": "Yes",
    }


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    (message,) = parse(messages=[{"role": "developer", "content": parts}]).messages
    assert message == {"role": "system", "content": "ab"}


def test_both_names_of_the_token_bound_are_known() -> None:
    assert parse(max_tokens=3).sampling.max_tokens == 3
    assert parse(max_completion_tokens=4).sampling.max_tokens == 4
    assert parse(max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5


def test_sampling_holds_what_was_asked_for() -> None:
    sampling = parse(temperature=0.7, top_p=0.9, top_k=-1, seed=3, stop="END").sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 0)
    assert (sampling.seed, sampling.stop) == (3, ["END"])
