"""From sampled ids to the pieces that a caller sees, token by token.

    ids ─► TextStream (whole characters) ─► StopFinder (cut) ─► Splitter (what is what) ─► pieces

What was shown so far is kept beside it, so a streamed answer and a whole one cannot differ.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """Reads one choice. Pieces come without logprobs and without the `Finish`."""

    @property
    def cut_at(self) -> str | None:
        """The stop string that ended the answer; tokens after it are not to be pushed."""

    @property
    def content(self) -> str:
        """Text that was shown so far."""

    @property
    def reasoning(self) -> str | None:
        """Reasoning that was shown so far; None when there was none."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls that were shown so far."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens pushed while the model thought, its markers included."""

    def push(self, token_id: int) -> Sequence[Piece]:
        """What this token makes visible; often nothing yet."""

    def end(self) -> Sequence[Piece]:
        """What is still held back, when no token follows."""


@dataclass(frozen=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Text of the reasoning."""

    text: str


Part = Said | Thought | ToolCall


class Splitter(Protocol):
    """Tells text, reasoning and calls apart; holds back what may be the start of markup."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is reasoning."""

    def push(self, text: str) -> Sequence[Part]:
        """The parts that `text` decides."""

    def end(self) -> Sequence[Part]:
        """What is held back, when nothing follows."""


class PlainSplitter:
    """Everything is text."""

    thinking = False

    def push(self, text: str) -> Sequence[Part]:
        """The text itself."""
        return [Said(text)] if text else []

    def end(self) -> Sequence[Part]:
        """Nothing is ever held."""
        return []


class AnswerParser:
    """The `OutputParser` of every renderer; what differs is the splitter."""

    def __init__(
        self, source: TextSource, splitter: Splitter, *, choice_index: int, stops: Sequence[str]
    ) -> None:
        self._source = source
        self._splitter = splitter
        self._is_plain = isinstance(splitter, PlainSplitter)
        self._stop = StopFinder(stops)
        self._choice_index = choice_index
        self._said: list[str] = []
        self._thought: list[str] | None = None
        self._calls: list[ToolCall] = []
        self._num_reasoning_tokens = 0
        self._num_silent = 0
        """Tokens since the last one that showed something."""

    @property
    def cut_at(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stop.found

    @property
    def content(self) -> str:
        """Text that was shown so far."""
        return "".join(self._said)

    @property
    def reasoning(self) -> str | None:
        """Reasoning that was shown so far; None when there was none."""
        return None if self._thought is None else "".join(self._thought)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls that were shown so far."""
        return tuple(self._calls)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens pushed while the model thought, its markers included."""
        return self._num_reasoning_tokens

    def push(self, token_id: int) -> Sequence[Piece]:
        """What this token makes visible."""
        text = self._stop.push(self._source.push(token_id))
        if self._is_plain:  # the usual case, once per sampled token
            if not text:
                return ()
            self._said.append(text)
            return (TextDelta(choice_index=self._choice_index, text=text),)
        thinking = self._splitter.thinking
        pieces = self._pieces(self._splitter.push(text)) if text else []
        self._count(thinking=thinking, shown=bool(pieces))
        return pieces

    def end(self) -> Sequence[Piece]:
        """What is still held back."""
        text = self._stop.push(self._source.flush()) + self._stop.flush()
        return self._pieces([*self._splitter.push(text), *self._splitter.end()])

    def _count(self, *, thinking: bool, shown: bool) -> None:
        """Count a token; one that completes an opening marker brings those before it along."""
        self._num_silent += 1
        if thinking:
            self._num_reasoning_tokens += 1
        elif self._splitter.thinking:
            self._num_reasoning_tokens += self._num_silent
        if shown or thinking:
            self._num_silent = 0

    def _pieces(self, parts: Sequence[Part]) -> list[Piece]:
        return [piece for part in parts for piece in self._show(part)]

    def _show(self, part: Part) -> Sequence[Piece]:
        index = self._choice_index
        if isinstance(part, Said):
            self._said.append(part.text)
            return [TextDelta(choice_index=index, text=part.text)]
        if isinstance(part, Thought):
            self._thought = self._thought or []
            self._thought.append(part.text)
            return [ReasoningDelta(choice_index=index, text=part.text)]
        number = len(self._calls)
        self._calls.append(part)
        return [
            ToolCallStart(choice_index=index, call_index=number, id=part.id, name=part.name),
            ArgumentsDelta(choice_index=index, call_index=number, json=part.arguments),
        ]


def plain_parser(decode: Decode, *, choice_index: int, stops: Sequence[str]) -> AnswerParser:
    """A parser for models, or requests, without markup."""
    return AnswerParser(TextStream(decode), PlainSplitter(), choice_index=choice_index, stops=stops)


NewId = Callable[[], str]
"""Makes the id of a tool call."""


def new_call_id() -> str:
    """`call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"
