"""Anthropic's messages as ours, written out by hand."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import RequestRefused
from onlinerl.serving.interaction.pieces import Piece
from onlinerl.serving.interaction.request import Message, ToolCall
from onlinerl.serving.protocols.messages.messages import messages_of, sign
from onlinerl.serving.protocols.messages.output_blocks import ContentBlocks
from tests.serving.protocol_cases import called, outcome, said, thought

USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bern"}}


def user(*content: object) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: object) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(value: str, **changes: object) -> dict[str, Any]:
    return {"type": "text", "text": value, **changes}


def result(call_id: str, content: object = "sunny", **changes: object) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **changes}


def refusal(*messages: Any, system: object = None) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        messages_of(system, messages)
    assert caught.value.status == 400
    return caught.value


def test_system_and_text_blocks_are_messages() -> None:
    system = [text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")]

    assert messages_of(system, [user(text("Good"), text("day"))]) == (
        Message(role="system", content="Be brief.\nBe kind."),
        Message(role="user", content="Good\nday"),
    )
    assert messages_of("Be brief.", [{"role": "user", "content": "Hi"}]) == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi"),
    )


def test_a_turn_with_tools_is_an_answer_and_a_message_for_each_result() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": sign("Hm.")}
    messages = [
        user(text("Weather?")),
        assistant(thinking, text("Let me look."), USE, {**USE, "id": "b"}),
        user(result("a"), result("b", [text("rain")]), text("Quick!")),
    ]

    call = ToolCall(id="a", name="weather", arguments='{"city": "Bern"}')
    assert messages_of(None, messages) == (
        Message(role="user", content="Weather?"),
        Message(
            role="assistant",
            content="Let me look.",
            reasoning="Hm.",
            tool_calls=(call, ToolCall(id="b", name="weather", arguments='{"city": "Bern"}')),
        ),
        Message(role="tool", content="sunny", tool_call_id="a", name="weather"),
        Message(role="tool", content="rain", tool_call_id="b", name="weather"),
        Message(role="user", content="Quick!"),
    )


def test_results_alone_are_no_message_of_the_user() -> None:
    *_, last = messages_of(None, [user(text("?")), assistant(USE), user(result("a"))])

    assert last == Message(role="tool", content="sunny", tool_call_id="a", name="weather")


def test_a_result_that_is_an_error_says_so() -> None:
    failed = result("a", "no such city", is_error=True)
    *_, last = messages_of(None, [user(text("?")), assistant(USE), user(failed)])

    assert last.content == "Error: no such city"


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "image", "source": {}}, "type"),
        ({"type": ["text"], "text": "x"}, "type"),
        ({"type": {}}, "type"),
        ({"type": "document", "source": {}}, "type"),
        ({"type": "redacted_thinking", "data": "x"}, "type"),
        (text("x", citations=[{"type": "char_location"}]), "citations"),
        (text("x", cache_control={"type": "eternal"}), "cache_control"),
        (USE, "type"),
        (result("nobody"), "tool_use_id"),
        ({"type": "text"}, "text"),
    ],
)
def test_unreadable_parts_are_refused_by_name(block: dict[str, Any], param: str) -> None:
    assert refusal(user(block)).param == f"messages.0.content.0.{param}"


def test_an_image_in_a_result_is_refused_by_name() -> None:
    image = result("a", [{"type": "image", "source": {}}])
    error = refusal(user(text("?")), assistant(USE), user(image))

    assert error.param == "messages.2.content.0.content.0.type"


def test_text_before_a_result_is_refused() -> None:
    error = refusal(user(text("?")), assistant(USE), user(text("x"), result("a")))

    assert error.param == "messages.2.content.1"


def test_an_answer_that_is_begun_for_the_model_is_refused() -> None:
    assert refusal(user(text("?")), assistant(text("{"))).param == "messages.1"


def test_a_system_that_is_no_text_is_refused() -> None:
    assert refusal(user(text("?")), system=7).param == "system"


@given(reasoning=st.text(max_size=5), content=st.text(max_size=5), num_calls=st.integers(0, 3))
def test_an_answer_that_comes_back_is_the_answer_that_was_given(
    reasoning: str, content: str, num_calls: int
) -> None:
    pieces: list[Piece] = [thought(reasoning), said(content)]
    for number in range(num_calls):
        pieces += called(number, "weather", '{"city": "Zürich"}')
    blocks = ContentBlocks()
    for piece in pieces:
        blocks.add(piece)
    blocks.close()
    sent = json.loads(json.dumps(blocks.blocks))

    given_answer = outcome(*pieces)
    assert messages_of(None, [user(text("?")), assistant(*sent), user(text("?"))])[1] == Message(
        role="assistant",
        content=given_answer.content,
        reasoning=given_answer.reasoning,
        tool_calls=given_answer.tool_calls,
    )
