"""Items of the responses protocol as messages, written out by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import RequestRefused
from onlinerl.serving.interaction.pieces import Piece
from onlinerl.serving.interaction.request import Message, ToolCall
from onlinerl.serving.protocols.responses.messages import messages_of, normalize_input, seal
from onlinerl.serving.protocols.responses.output_items import OutputItems
from tests.serving.protocol_cases import SOURCE, called, outcome, said, thought

OTHER = "01890000-0000-7000-8000-000000000002"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(call_id: str, **changes: Any) -> dict[str, Any]:
    item = {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": "{}"}
    return {**item, **changes}


def output(call_id: str, text: object = "sunny") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def answer(text: str, **changes: Any) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": parts, **changes}


def refusal(*items: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        messages_of(items)
    assert caught.value.status == 400
    return caught.value


def test_a_text_is_a_message_of_the_user() -> None:
    assert messages_of(normalize_input("Hi")) == (Message(role="user", content="Hi"),)


def test_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "input_text", "text": "Good"}, {"type": "input_text", "text": " day"}]

    assert messages_of([{"role": "user", "content": parts}]) == (
        Message(role="user", content="Good day"),
    )


def test_a_developer_is_a_system() -> None:
    assert messages_of([{"role": "developer", "content": "Be brief."}]) == (
        Message(role="system", content="Be brief."),
    )


def test_reasoning_text_and_calls_are_one_message() -> None:
    reasoning = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    items = [user("?"), reasoning, answer("Let me look."), call("a"), call("b")]
    items += [output("a"), output("b", [{"type": "input_text", "text": "rain"}])]

    assert messages_of(items) == (
        Message(role="user", content="?"),
        Message(
            role="assistant",
            content="Let me look.",
            reasoning="Hm.",
            tool_calls=(
                ToolCall(id="a", name="weather", arguments="{}"),
                ToolCall(id="b", name="weather", arguments="{}"),
            ),
        ),
        Message(role="tool", content="sunny", tool_call_id="a", name="weather"),
        Message(role="tool", content="rain", tool_call_id="b", name="weather"),
    )


def test_text_on_both_sides_of_a_call_is_one_message() -> None:
    (message,) = messages_of([answer("One."), call("a"), answer("Two.")])

    assert message.content == "One.Two."


def test_answers_in_a_row_are_two_messages() -> None:
    assert len(messages_of([answer("One."), answer("Two.")])) == 2


def test_ids_of_one_answer_keep_its_items_together() -> None:
    one = answer("One.", id=f"msg_{SOURCE}_0")
    two = answer("Two.", id=f"msg_{SOURCE}_2")
    other = answer("Two.", id=f"msg_{OTHER}_0")

    assert len(messages_of([one, two])) == 1
    assert len(messages_of([one, other])) == 2


def test_reasoning_that_follows_an_answer_begins_the_next() -> None:
    reasoning = {"type": "reasoning", "encrypted_content": seal("Hm.")}
    one, two = messages_of([answer("One."), reasoning, answer("Two.")])

    assert (one.reasoning, two.reasoning) == (None, "Hm.")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "content.0.type",
        ),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "content.0.type"),
        ({"role": "user", "content": 7}, "content"),
        ({"role": "robot", "content": "x"}, "role"),
        ({"type": "web_search_call", "id": "x"}, "type"),
        ({"type": ["message"], "role": "user", "content": "x"}, "type"),
        ({"type": {"a": 1}}, "type"),
        ({"type": "item_reference", "id": "x"}, "type"),
        (output("nobody"), "call_id"),
        (call("a", arguments={}), "arguments"),
        (call("a", namespace="x"), "namespace"),
        ({"type": "reasoning", "encrypted_content": "gAAAA"}, "encrypted_content"),
        ({"type": "reasoning", "encrypted_content": "other.1.SG0u"}, "encrypted_content"),
        ({"type": "reasoning", "encrypted_content": "onlinerl.1.?"}, "encrypted_content"),
    ],
)
def test_unreadable_parts_are_refused_by_name(item: dict[str, Any], param: str) -> None:
    assert refusal(user("Hi"), item).param == f"input.1.{param}"


def test_an_item_that_is_no_object_is_refused() -> None:
    assert refusal("Hi").param == "input.0"


@pytest.mark.parametrize("status", ["in_progress", "completed", "incomplete", None])
def test_the_status_of_an_earlier_item_changes_nothing(status: str | None) -> None:
    assert messages_of([answer("One.", status=status)]) == messages_of([answer("One.")])


@given(
    reasoning=st.text(max_size=5),
    text=st.text(max_size=5),
    num_calls=st.integers(0, 3),
    keep_ids=st.booleans(),
)
def test_an_answer_that_comes_back_is_the_answer_that_was_given(
    reasoning: str, text: str, num_calls: int, keep_ids: bool
) -> None:
    pieces: list[Piece] = [thought(reasoning), said(text)]
    for number in range(num_calls):
        pieces += called(number, "weather", "{}")
    items = OutputItems(source=SOURCE)
    for piece in pieces:
        items.add(piece)
    items.close("completed")
    sent = items.items if keep_ids else [{**item, "id": None} for item in items.items]

    given_answer = outcome(*pieces)
    assert messages_of(sent) == (
        Message(
            role="assistant",
            content=given_answer.content,
            reasoning=given_answer.reasoning,
            tool_calls=given_answer.tool_calls,
        ),
    )
