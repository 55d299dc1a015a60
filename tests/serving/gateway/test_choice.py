"""One choice, fed by hand. Tokens are the code points of their text."""

import math
from collections.abc import Sequence

import pytest

from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.serving.gateway.choice import Choice
from onlinerl.serving.gateway.logprob_view import LogprobView
from onlinerl.serving.interaction.engine import Chunk, Generate, TopLogprob
from onlinerl.serving.interaction.pieces import (
    ArgumentsDelta,
    Finish,
    Piece,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)
from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.parsing.output_parser import plain_parser


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(token_id) for token_id in token_ids)


class Calls:
    """A parser to which `#` is a call of `f`, `~` a thought, and everything else is text."""

    cut_at = None
    reasoning = None
    num_reasoning_tokens = 0

    def __init__(self) -> None:
        self.content = ""
        self.tool_calls: tuple[ToolCall, ...] = ()

    def push(self, token_id: int) -> Sequence[Piece]:
        character = chr(token_id)
        if character == "~":
            return [ReasoningDelta(choice_index=0, text="hm")]
        if character != "#":
            self.content += character
            return [TextDelta(choice_index=0, text=character)]
        number = len(self.tool_calls)
        self.tool_calls += (ToolCall(id=f"c{number}", name="f", arguments="{}"),)
        return [
            ToolCallStart(choice_index=0, call_index=number, id=f"c{number}", name="f"),
            ArgumentsDelta(choice_index=0, call_index=number, json="{}"),
        ]

    def end(self) -> Sequence[Piece]:
        return []


def make(*, stops: Sequence[str] = (), num_top: int | None = None) -> Choice:
    return Choice(
        Generate(request_id="r", token_ids=[1], sampling={}),
        index=0,
        parser=plain_parser(decode, choice_index=0, stops=stops),
        view=None if num_top is None else LogprobView(text_of, num_top=num_top),
    )


def make_calls(*, parallel: bool = True) -> Choice:
    request = Generate(request_id="r", token_ids=[1], sampling={})
    return Choice(request, index=0, parser=Calls(), parallel_calls=parallel)


def text_of(token_id: int) -> tuple[str, bytes]:
    return chr(token_id), chr(token_id).encode()


def chunk(text: str, **changes: object) -> Chunk:
    values: dict[str, object] = {"token_ids": ids(text), "logprobs": [-0.5] * len(text)}
    return Chunk(**(values | changes))  # type: ignore[arg-type]


def test_a_chunk_of_several_tokens_is_one_piece() -> None:
    choice = make()

    assert choice.take(chunk("abc")) == [TextDelta(choice_index=0, text="abc", logprobs=[])]
    assert choice.take(chunk("d", finish_reason="stop")) == [
        TextDelta(choice_index=0, text="d"),
        Finish(choice_index=0, reason="stop"),
    ]
    assert (choice.outcome.content, choice.outcome.num_tokens) == ("abcd", 4)


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("stop", True), ("length", True), ("abort", False), ("error", False), ("odd", False)],
)
def test_only_a_whole_answer_has_a_finish(reason: str, shown: bool) -> None:
    pieces = make().take(chunk("a", finish_reason=reason))

    assert (Finish(choice_index=0, reason=reason) in pieces) == shown


def test_tokens_after_a_stop_string_are_not_kept() -> None:
    choice = make(stops=["cd"])
    shown = choice.take(chunk("abcdef"))

    assert shown == [TextDelta(choice_index=0, text="ab", logprobs=[])]
    assert choice.sampled.token_ids == ids("abcd")
    assert len(choice.sampled.logprobs) == 4
    assert choice.is_cut
    span = VersionSpan(version="assistant/1", start=0, end=6)
    last = choice.take(chunk("g", finish_reason="abort", version_spans=[span]))
    assert last == [Finish(choice_index=0, reason="stop")]
    assert choice.sampled.version_spans == [VersionSpan(version="assistant/1", start=0, end=4)]
    assert choice.outcome.stop_string == "cd"


def test_an_answer_with_calls_ends_with_them() -> None:
    choice = make_calls()
    choice.take(chunk("a##"))
    last = choice.take(chunk("", finish_reason="stop"))

    assert last == [Finish(choice_index=0, reason="tool_calls")]
    assert [call.id for call in choice.outcome.tool_calls] == ["c0", "c1"]


def test_an_answer_with_calls_that_ran_out_of_tokens_says_so() -> None:
    choice = make_calls()
    (*_, finish) = choice.take(chunk("#", finish_reason="length"))

    assert finish == Finish(choice_index=0, reason="length")


def test_without_parallel_calls_the_answer_ends_before_the_second() -> None:
    choice = make_calls(parallel=False)
    pieces = choice.take(chunk("a#b#c"))

    assert [type(piece) for piece in pieces] == [
        TextDelta,
        ToolCallStart,
        ArgumentsDelta,
        TextDelta,
    ]
    assert choice.is_cut
    assert choice.sampled.token_ids == ids("a#b#")
    last = choice.take(chunk("", finish_reason="abort"))
    assert last == [Finish(choice_index=0, reason="tool_calls")]
    assert [call.id for call in choice.outcome.tool_calls] == ["c0"]
    assert [call.id for call in choice.message.tool_calls] == ["c0"]


class AtTheEnd(Calls):
    """A parser that reads calls, and what is around them, only when the answer has ended."""

    reasoning: str | None = "hm, no"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []

    def push(self, token_id: int) -> Sequence[Piece]:
        self.held.append(token_id)
        return []

    def end(self) -> Sequence[Piece]:
        return [piece for token_id in self.held for piece in super(AtTheEnd, self).push(token_id)]


def test_what_follows_a_second_call_that_is_not_shown_is_not_in_the_answer() -> None:
    request = Generate(request_id="r", token_ids=[1], sampling={})
    choice = Choice(request, index=0, parser=AtTheEnd(), parallel_calls=False)
    pieces = choice.take(chunk("~a#b#c", finish_reason="stop"))

    shown = "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
    assert shown == choice.outcome.content == choice.message.content == "ab"
    assert choice.outcome.reasoning == choice.message.reasoning == "hm"
    assert len(choice.outcome.tool_calls) == 1


def test_pieces_of_different_kinds_stay_apart() -> None:
    pieces = make_calls().take(chunk("~~a~b#"))

    assert [type(piece) for piece in pieces] == [
        ReasoningDelta,
        TextDelta,
        ReasoningDelta,
        TextDelta,
        ToolCallStart,
        ArgumentsDelta,
    ]
    assert pieces[0] == ReasoningDelta(choice_index=0, text="hmhm", logprobs=[])


def test_every_token_has_its_logprob_once_and_in_order() -> None:
    choice = make(stops=["bx"], num_top=0)
    pieces = [
        *choice.take(chunk("a")),
        *choice.take(chunk("b")),  # held back: it may begin the stop string
        *choice.take(chunk("c")),
        *choice.take(chunk("b", finish_reason="length")),
    ]

    shown = [each.text for piece in pieces for each in piece.logprobs]
    assert shown == ["a", "b", "c", "b"]
    texts = [piece.text for piece in pieces if isinstance(piece, TextDelta)]
    assert texts == ["a", "bc", "b"]
    assert [each.text for each in choice.outcome.logprobs] == shown


def test_a_token_that_shows_no_text_brings_its_logprob_with_the_finish() -> None:
    choice = make(stops=["b"], num_top=0)
    choice.take(chunk("ab"))
    (finish,) = choice.take(chunk("", finish_reason="abort"))

    assert [each.text for each in finish.logprobs] == ["b"]


def test_alternatives_are_cut_and_odd_logprobs_are_sent_as_a_floor() -> None:
    choice = make(num_top=1)
    top = [TopLogprob(token_id=120, logprob=-math.inf), TopLogprob(token_id=121, logprob=-2.0)]
    (piece,) = choice.take(chunk("a", logprobs=[math.nan], top_logprobs=[top]))

    (token,) = piece.logprobs
    assert (token.text, token.token_bytes, token.logprob) == ("a", b"a", -9999.0)
    assert [(each.text, each.logprob) for each in token.top] == [("x", -9999.0)]
    # What is logged is what was received.
    assert math.isnan(choice.sampled.logprobs[0])


def test_a_missing_logprob_is_shown_and_not_logged() -> None:
    choice = make(num_top=0)
    (piece,) = choice.take(chunk("ab", logprobs=[-0.5]))

    assert [each.logprob for each in piece.logprobs] == [-0.5, -9999.0]
    assert choice.sampled.logprobs == [-0.5]


def test_cached_tokens_come_with_or_after_the_finish() -> None:
    choice = make()
    choice.take(chunk("a", finish_reason="stop"))
    assert choice.outcome.num_cached_tokens is None
    choice.take(Chunk(num_cached_tokens=3))

    assert choice.outcome.num_cached_tokens == 3


def test_the_outcome_holds_what_a_reader_of_the_stream_was_sent() -> None:
    choice = make()
    sent = [*choice.take(chunk("a")), *choice.take(chunk("b", finish_reason="stop"))]

    assert list(choice.outcome.pieces) == sent


def test_an_answer_whose_end_cannot_be_read_has_not_ended() -> None:
    class Broken(Calls):
        def end(self) -> Sequence[Piece]:
            raise ZeroDivisionError

    request = Generate(request_id="r", token_ids=[1], sampling={})
    choice = Choice(request, index=0, parser=Broken())
    with pytest.raises(ZeroDivisionError):
        choice.take(chunk("a", finish_reason="stop"))

    assert not choice.has_ended
