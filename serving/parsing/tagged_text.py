"""Splits text, reasoning and tool calls between markers as they come.

Text is held back while it may still become markup, and a call until it is whole. A valid call is
shown as a call and never as text; everything else is shown as text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.parsing.output_parser import Part, ReasoningPart, Splitter, TextPart

_SPACE = " \t\r\n"


@dataclass(frozen=True, kw_only=True)
class Markers:
    """How a family of models marks reasoning and calls; empty if it has none."""

    think_open: str = "<think>"
    think_close: str = "</think>"
    call_opens: tuple[str, ...] = ("<tool_call>",)
    """Texts that a call, or a list of calls, may begin with."""


@dataclass(frozen=True, kw_only=True)
class AnswerFeatures:
    """The parts that one answer may hold in addition to text."""

    reasoning: bool = False
    """Whether the model may reason."""
    starts_reasoning: bool = False
    """Whether the answer begins within reasoning, because the prompt opened it."""
    tools: bool = False
    """Whether calls are read as calls."""


State = Literal["start", "reasoning", "draft", "text", "call"]


class TaggedSplitter(Splitter, ABC):
    """The `Splitter` of models that reason first, and write calls between markers.

    start ──open──► reasoning ──close──► text ──call marker──► call ──(see subclass)──► text
    start ──else──► text                 reasoning ──call marker──► draft ──close──► text

    A call within reasoning is a draft, unless the answer ends without closing the reasoning.
    White space between a marker and the text around it belongs to the markup.
    """

    def __init__(self, features: AnswerFeatures, markers: Markers) -> None:
        self._markers = markers
        self._call_opens = markers.call_opens if features.tools else ()
        self._state: State = "start" if features.reasoning else "text"
        if features.starts_reasoning:
            self._state = "reasoning"
        self._held = ""
        """Text that may still become markup."""
        self._kept: list[str] = []
        """In a call or draft: the white space before it, its marker and its body, up to `_held`."""
        self._after_markup = features.starts_reasoning
        """Whether markup came last, so that white space after it is no text."""
        self._steps: dict[State, Callable[[], Iterator[Part]]] = {
            "start": self._read_start,
            "reasoning": self._read_reasoning,
            "draft": self._read_draft,
            "text": self._read_text,
            "call": self._read_call,
        }

    @property
    @override
    def thinking(self) -> bool:
        return self._state in ("reasoning", "draft")

    @override
    def push(self, text: str) -> Sequence[Part]:
        self._held += text
        parts: list[Part] = []
        state: State | None = None
        while self._held and state != self._state:
            state = self._state
            parts += self._steps[state]()
        return parts

    @override
    def end(self) -> Sequence[Part]:
        held = "".join([*self._kept, self._held])
        self._kept, self._held = [], ""
        if self._state in ("call", "draft"):
            parts = self._read_unfinished(held)
            calls = any(isinstance(part, ToolCall) for part in parts)
            return [ReasoningPart(held)] if self._state == "draft" and not calls else parts
        if not held or (self._after_markup and not held.strip(_SPACE)):
            return []
        return [ReasoningPart(held) if self._state == "reasoning" else TextPart(held)]

    @abstractmethod
    def _read_call(self) -> Iterator[Part]:
        """A step within a call. `_kept` holds white space, marker and the body so far."""

    @abstractmethod
    def _read_unfinished(self, held: str) -> Sequence[Part]:
        """The parts of an unfinished call, given with its opening marker."""

    def _read_start(self) -> Iterator[Part]:
        marker = self._markers.think_open
        body = self._held.lstrip(_SPACE)
        if body.startswith(marker):
            self._enter("reasoning", body.removeprefix(marker))
        elif not marker.startswith(body):
            self._state = "text"
        yield from ()

    def _read_reasoning(self) -> Iterator[Part]:
        if self._after_markup:
            self._held = self._held.lstrip("\n")
        close = self._markers.think_close
        split = split_at(self._held, (close, *self._call_opens), space="\n")
        if split.shown:
            self._after_markup = False
            yield ReasoningPart(split.shown)
        if split.marker == close:
            self._enter("text", split.rest)
        elif split.marker:
            self._open_call("draft", split)
        else:
            self._held = split.rest

    def _read_draft(self) -> Iterator[Part]:
        body, marker, rest = self._held.partition(self._markers.think_close)
        if marker:
            yield ReasoningPart("".join([*self._kept, body]).rstrip("\n"))
            self._kept = []
            self._enter("text", rest)
        else:
            self._keep_up_to(tail_start(body, [self._markers.think_close]))

    def _read_text(self) -> Iterator[Part]:
        if self._after_markup:
            self._held = self._held.lstrip("\n")
        split = split_at(self._held, self._call_opens, space=_SPACE)
        if split.shown:
            self._after_markup = False
            yield TextPart(split.shown)
        if split.marker:
            self._open_call("call", split)
        else:
            self._held = split.rest

    def _enter(self, state: State, rest: str) -> None:
        self._state, self._held, self._after_markup = state, rest, True

    def _open_call(self, state: State, split: "Split") -> None:
        self._state, self._held = state, split.rest
        self._kept = [split.gap, split.marker]

    def _keep_up_to(self, end: int) -> None:
        self._kept.append(self._held[:end])
        self._held = self._held[end:]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Text around the first marker in it."""

    shown: str
    """Text before the marker."""
    gap: str
    """White space between `shown` and the marker."""
    marker: str
    """The marker; empty if there is none."""
    rest: str
    """Text after the marker; without a marker, the tail that may begin one."""


def split_at(text: str, markers: Sequence[str], *, space: str) -> Split:
    """Cut `text` at the first of `markers`, or where one may begin at its end."""
    if not markers:
        return Split(shown=text, gap="", marker="", rest="")
    places = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not places:
        shown = text[: tail_start(text, markers)].rstrip(space)
        return Split(shown=shown, gap="", marker="", rest=text[len(shown) :])
    at, marker = min(places)
    shown = text[:at].rstrip(space)
    rest = text[at + len(marker) :]
    return Split(shown=shown, gap=text[len(shown) : at], marker=marker, rest=rest)


def tail_start(text: str, markers: Sequence[str]) -> int:
    """The place where the longest tail of `text` starts that may begin one of `markers`."""
    longest = max(len(marker) for marker in markers) - 1
    tail = text[-longest:]
    starts = [
        at
        for marker in markers
        if (at := tail.find(marker[0])) >= 0  # the usual case: no marker can have begun
    ]
    for start in range(min(starts, default=len(tail)), len(tail)):
        if any(marker.startswith(tail[start:]) for marker in markers):
            return len(text) - len(tail) + start
    return len(text)
