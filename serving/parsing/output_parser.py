"""From sampled ids to the pieces that a caller sees, token by token.

    ids ─► TextSource (whole characters) ─► StopFinder (cut) ─► Splitter (kinds of text) ─► pieces

The parser remembers everything that it has shown, so a streamed and a whole answer cannot differ.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from onlinerl.serving.interaction.pieces import (
    ArgumentsDelta,
    Piece,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)
from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.tokens.decoder import Decode, StopFinder, TextSource, TextStream


class OutputParser(Protocol):
    """Reads one choice; make one for each. Its pieces have no logprobs, and no `Finish`."""

    @property
    def cut_at(self) -> str | None:
        """The stop string that ended the answer; push no token after it."""

    @property
    def content(self) -> str:
        """Text that was shown so far."""

    @property
    def reasoning(self) -> str | None:
        """Reasoning that was shown so far; None if there was none."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls that were shown so far."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens within reasoning, its markers included."""

    def push(self, token_id: int) -> Sequence[Piece]:
        """The pieces that this token completes; often none."""

    def end(self) -> Sequence[Piece]:
        """The pieces that are still held back; call it after the last token."""


@dataclass(frozen=True)
class TextPart:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """Text of the reasoning."""

    text: str


Part = TextPart | ReasoningPart | ToolCall


class Splitter(Protocol):
    """Splits text into text, reasoning and calls; holds back what may become markup."""

    @property
    def thinking(self) -> bool:
        """Whether the next text is reasoning."""

    def push(self, text: str) -> Sequence[Part]:
        """The parts that `text` completes."""

    def end(self) -> Sequence[Part]:
        """The parts that are still held back; call it after the last text."""


class PlainSplitter(Splitter):
    """The `Splitter` of answers without markup: everything is text."""

    thinking = False

    @override
    def push(self, text: str) -> Sequence[Part]:
        return [TextPart(text)] if text else []

    @override
    def end(self) -> Sequence[Part]:
        return []


class AnswerParser(OutputParser):
    """The `OutputParser` of every renderer; renderers differ in source and splitter."""

    def __init__(
        self, source: TextSource, splitter: Splitter, *, choice_index: int, stops: Sequence[str]
    ) -> None:
        self._source = source
        self._splitter = splitter
        self._is_plain = isinstance(splitter, PlainSplitter)
        self._stop = StopFinder(stops)
        self._choice_index = choice_index
        self._shown_text: list[str] = []
        self._shown_reasoning: list[str] | None = None
        self._calls: list[ToolCall] = []
        self._num_reasoning_tokens = 0
        self._num_pending = 0
        """Number of tokens since the last one that completed a piece."""

    @property
    @override
    def cut_at(self) -> str | None:
        return self._stop.match

    @property
    @override
    def content(self) -> str:
        return "".join(self._shown_text)

    @property
    @override
    def reasoning(self) -> str | None:
        return None if self._shown_reasoning is None else "".join(self._shown_reasoning)

    @property
    @override
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._calls)

    @property
    @override
    def num_reasoning_tokens(self) -> int:
        return self._num_reasoning_tokens

    @override
    def push(self, token_id: int) -> Sequence[Piece]:
        text = self._stop.push(self._source.push(token_id))
        if self._is_plain:  # the usual case, for every sampled token
            if not text:
                return ()
            self._shown_text.append(text)
            return (TextDelta(choice_index=self._choice_index, text=text),)
        thinking = self._splitter.thinking
        pieces = self._pieces(self._splitter.push(text)) if text else []
        self._count(thinking=thinking, shown=bool(pieces))
        return pieces

    @override
    def end(self) -> Sequence[Piece]:
        text = self._stop.push(self._source.flush()) + self._stop.flush()
        return self._pieces([*self._splitter.push(text), *self._splitter.end()])

    def _count(self, *, thinking: bool, shown: bool) -> None:
        """Count a token; one that completes an opening marker also counts the tokens before it."""
        self._num_pending += 1
        if thinking:
            self._num_reasoning_tokens += 1
        elif self._splitter.thinking:
            self._num_reasoning_tokens += self._num_pending
        if shown or thinking:
            self._num_pending = 0

    def _pieces(self, parts: Sequence[Part]) -> list[Piece]:
        return [piece for part in parts for piece in self._show(part)]

    def _show(self, part: Part) -> Sequence[Piece]:
        index = self._choice_index
        if isinstance(part, TextPart):
            self._shown_text.append(part.text)
            return [TextDelta(choice_index=index, text=part.text)]
        if isinstance(part, ReasoningPart):
            self._shown_reasoning = self._shown_reasoning or []
            self._shown_reasoning.append(part.text)
            return [ReasoningDelta(choice_index=index, text=part.text)]
        number = len(self._calls)
        self._calls.append(part)
        return [
            ToolCallStart(choice_index=index, call_index=number, id=part.id, name=part.name),
            ArgumentsDelta(choice_index=index, call_index=number, json=part.arguments),
        ]


def plain_parser(decode: Decode, *, choice_index: int, stops: Sequence[str]) -> AnswerParser:
    """A parser for a model or a request without markup."""
    return AnswerParser(TextStream(decode), PlainSplitter(), choice_index=choice_index, stops=stops)


NewId = Callable[[], str]
"""Makes the ids of tool calls."""


def new_call_id() -> str:
    """A random id: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"
