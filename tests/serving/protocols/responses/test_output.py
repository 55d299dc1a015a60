"""Answers as items of the responses protocol, written out by hand."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import EngineAborted
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Piece, TokenLogprob
from onlinerl.serving.interaction.request import Conversation, Message
from onlinerl.serving.protocols.responses.output import ResponsesWriter
from onlinerl.serving.protocols.responses.protocol import ResponsesWire
from onlinerl.serving.protocols.responses.request import ResponsesRequest
from onlinerl.serving.protocols.responses.store import MemoryResponseStore
from tests.serving.protocol_cases import (
    SOURCE,
    called,
    events,
    exchange,
    outcome,
    said,
    streamed,
    thought,
)

WIRE = ResponsesWire(MemoryResponseStore(max_rows=10, retain_s=60))


def asked_exchange(*, sealed: bool = False) -> Exchange:
    request = ResponsesRequest(
        protocol="openai.responses",
        model="assistant",
        prompt=Conversation(messages=(Message(role="user", content="Hi"),)),
        sampling=Sampling(temperature=0.5, max_tokens=9),
        input_items=(),
        previous=None,
        store=True,
        sealed=sealed,
        echo={"store": True},
    )
    return exchange(request)


def stream_of(*pieces: Piece, finish: str = "stop", **changes: Any) -> list[dict[str, Any]]:
    ended = outcome(*pieces, finish=finish, **changes)
    return streamed(ResponsesWriter(asked_exchange()), ended)


def whole_of(*pieces: Piece, finish: str = "stop", **changes: Any) -> dict[str, Any]:
    return WIRE.whole(asked_exchange(), [outcome(*pieces, finish=finish, **changes)])


def text_item(text: str, *, index: int = 0, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{SOURCE}_{index}",
        "type": "message",
        "role": "assistant",
        "content": [part],
        "status": status,
    }


def test_text_is_streamed_as_one_message_item() -> None:
    text_id = f"msg_{SOURCE}_0"
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    started = {**text_item(""), "content": [], "status": "in_progress"}
    created, in_progress, *rest, completed = stream_of(said("Click"), said(" here."))

    place = {"item_id": text_id, "output_index": 0}
    assert [created["type"], in_progress["type"]] == ["response.created", "response.in_progress"]
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    assert [{k: v for k, v in event.items() if k != "sequence_number"} for event in rest] == [
        {"type": "response.output_item.added", "output_index": 0, "item": started},
        {"type": "response.content_part.added", **place, "content_index": 0, "part": empty},
        {
            "type": "response.output_text.delta",
            **place,
            "content_index": 0,
            "delta": "Click",
            "logprobs": [],
        },
        {
            "type": "response.output_text.delta",
            **place,
            "content_index": 0,
            "delta": " here.",
            "logprobs": [],
        },
        {
            "type": "response.output_text.done",
            **place,
            "content_index": 0,
            "text": "Click here.",
            "logprobs": [],
        },
        {
            "type": "response.content_part.done",
            **place,
            "content_index": 0,
            "part": {**empty, "text": "Click here."},
        },
        {
            "type": "response.output_item.done",
            "output_index": 0,
            "item": text_item("Click here."),
        },
    ]
    assert completed["type"] == "response.completed"
    assert completed["response"]["output"] == [text_item("Click here.")]


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    stream = stream_of(
        thought("Two"),
        thought(" cities."),
        said("Let me look."),
        *called(0, "weather", '{"city":', '"Bern"}'),
        *called(1, "weather", '{"city":"Basel"}'),
        finish="tool_calls",
    )

    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    reasoning, message, bern, basel = stream[-1]["response"]["output"]
    assert reasoning == {
        "id": f"rs_{SOURCE}_0",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Two cities."}],
        "status": "completed",
    }
    assert message == text_item("Let me look.", index=1)
    assert bern == {
        "id": f"fc_{SOURCE}_2",
        "type": "function_call",
        "call_id": "call_0",
        "name": "weather",
        "arguments": '{"city":"Bern"}',
        "status": "completed",
    }
    assert (basel["id"], basel["call_id"]) == (f"fc_{SOURCE}_3", "call_1")


def test_text_after_a_call_is_a_second_message_in_its_place() -> None:
    pieces = [said("One."), *called(0, "weather", "{}"), said("Two.")]

    output = whole_of(*pieces)["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert stream_of(*pieces)[-1]["response"]["output"] == output


def test_an_answer_at_its_bound_is_incomplete() -> None:
    body = whole_of(said("Click"), finish="length")

    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert body["output"] == [text_item("Click", status="incomplete")]
    assert stream_of(said("Click"), finish="length")[-1]["type"] == "response.incomplete"


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    assert whole_of()["output"] == [text_item("")]


def test_usage_counts_logged_tokens() -> None:
    body = whole_of(said("Hi"), num_tokens=7, num_reasoning_tokens=5, num_cached_tokens=2)

    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 10,
    }


def logprob(text: str, value: float) -> TokenLogprob:
    other = TokenLogprob(text="?", token_bytes=b"?", logprob=-3.0)
    return TokenLogprob(text=text, token_bytes=text.encode(), logprob=value, top=(other,))


def test_logprobs_are_those_of_the_text_alone() -> None:
    marker = logprob("<call>", -0.1)
    pieces = [said("", logprob("H", -1.0)), said("Hi", logprob("i", -2.0)), said("", marker)]
    pieces += [said("", marker)]
    stream = stream_of(*pieces, *called(0, "weather", "{}"))

    deltas = [event for event in stream if event["type"] == "response.output_text.delta"]
    assert deltas[0]["logprobs"] == [
        {"token": "H", "logprob": -1.0, "top_logprobs": [{"token": "?", "logprob": -3.0}]},
        {"token": "i", "logprob": -2.0, "top_logprobs": [{"token": "?", "logprob": -3.0}]},
    ]
    shown = stream[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert shown[0] == {
        "token": "H",
        "bytes": [72],
        "logprob": -1.0,
        "top_logprobs": [{"token": "?", "bytes": [63], "logprob": -3.0}],
    }


def test_markup_before_any_text_opens_no_message() -> None:
    pieces = [said("", logprob("<call>", -0.1)), *called(0, "weather", "{}")]

    (item,) = whole_of(*pieces)["output"]
    assert item["type"] == "function_call"


def test_markup_of_a_call_is_not_shown_with_the_text_after_it() -> None:
    marker, word = logprob("<call>", -0.1), logprob("Hi", -0.2)
    output = whole_of(said("", marker), *called(0, "weather", "{}"), said("Hi", word))["output"]

    assert [shown["token"] for shown in output[1]["content"][0]["logprobs"]] == ["Hi"]


def test_sealed_reasoning_carries_itself() -> None:
    wire_exchange = asked_exchange(sealed=True)
    (item, _) = WIRE.whole(wire_exchange, [outcome(thought("Hm."), said("Yes."))])["output"]

    assert item["encrypted_content"] == "onlinerl.1.SG0u"


def test_a_stream_that_breaks_ends_with_an_error_and_the_failed_response() -> None:
    writer = ResponsesWriter(asked_exchange())
    data = writer.open() + writer.write(thought("Hm.")) + writer.write(said("Click"))
    *_, error, failed = events(data + writer.fail(EngineAborted("the engine went away")))

    assert (error["type"], error["message"]) == ("error", "the engine went away")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert [item["type"] for item in failed["response"]["output"]] == ["reasoning"]
    assert failed["sequence_number"] == error["sequence_number"] + 1


@st.composite
def answers(draw: st.DrawFn) -> list[Piece]:
    pieces: list[Piece] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "thought", "call", "nothing"]), max_size=8)):
        text = draw(st.text(max_size=5))
        if kind == "text":
            pieces.append(said(text))
        elif kind == "thought":
            pieces.append(thought(text))
        elif kind == "nothing":
            pieces.append(said("", logprob("x", -1.0)))
        else:
            pieces += called(num_calls, "weather", "{", "}")
            num_calls += 1
    return pieces


@given(pieces=answers(), finish=st.sampled_from(["stop", "length", "tool_calls"]))
def test_a_streamed_answer_is_the_whole_one(pieces: Sequence[Piece], finish: str) -> None:
    stream = stream_of(*pieces, finish=finish)
    whole = whole_of(*pieces, finish=finish)

    assert stream[-1]["response"] == whole
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    added = [event["item"] for event in stream if event["type"] == "response.output_item.added"]
    assert {item["status"] for item in added} <= {"in_progress"}
    done = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    for index, item in enumerate(whole["output"]):
        about = [event for event in stream if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in about} <= {index}
        deltas = "".join(event["delta"] for event in about if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
