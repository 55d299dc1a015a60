"""Reasoning and tool calls between markers, told apart as text comes in.

Text is held back while it may still turn out to be markup, and a call until it is whole: a valid
one is shown as a call and never as text, anything else is shown as the text that it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.parsing.output_parser import Part, Said, Thought

_SPACE = " \t\r\n"


@dataclass(frozen=True, kw_only=True)
class Markers:
    """How a family of models marks what is not text; empty where it has none."""

    think_open: str = "<think>"
    think_close: str = "</think>"
    call_opens: tuple[str, ...] = ("<tool_call>",)
    """What a call, or a list of calls, may begin with."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one answer may hold beside text."""

    reasoning: bool = False
    """Whether the model may think."""
    opened: bool = False
    """Whether the prompt ends within reasoning, so that the answer begins there."""
    tools: bool = False
    """Whether calls are read."""


State = Literal["start", "reasoning", "draft", "text", "call"]


class TaggedSplitter(ABC):
    """The `Splitter` of models that think first, and write calls between markers.

    start ──open──► reasoning ──close──► text ──call marker──► call ──(see subclass)──► text
    start ──else──► text                 reasoning ──call marker──► draft ──close──► text

    A call within reasoning is a draft, unless the answer ends without closing the reasoning.
    Space between a marker and the text around it belongs to the markup.
    """

    def __init__(self, expected: Expected, markers: Markers) -> None:
        self._markers = markers
        self._call_opens = markers.call_opens if expected.tools else ()
        self._state: State = "start" if expected.reasoning else "text"
        if expected.opened:
            self._state = "reasoning"
        self._held = ""
        """Text whose meaning is open."""
        self._kept: list[str] = []
        """In a call or draft: the space before it, its marker and body, up to `_held`."""
        self._after_markup = expected.opened
        """Whether markup was the last thing: space that follows it is no text."""
        self._steps: dict[State, Callable[[], Iterator[Part]]] = {
            "start": self._start,
            "reasoning": self._reason,
            "draft": self._draft,
            "text": self._say,
            "call": self._call,
        }

    @property
    def thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._state in ("reasoning", "draft")

    def push(self, text: str) -> Sequence[Part]:
        """The parts that `text` decides."""
        self._held += text
        parts: list[Part] = []
        state: State | None = None
        while self._held and state != self._state:
            state = self._state
            parts += self._steps[state]()
        return parts

    def end(self) -> Sequence[Part]:
        """What is held back: unfinished markup is the text that it is."""
        held = "".join([*self._kept, self._held])
        self._kept, self._held = [], ""
        if self._state in ("call", "draft"):
            parts = self._read_unfinished(held)
            calls = any(isinstance(part, ToolCall) for part in parts)
            return [Thought(held)] if self._state == "draft" and not calls else parts
        if not held or (self._after_markup and not held.strip(_SPACE)):
            return []
        return [Thought(held) if self._state == "reasoning" else Said(held)]

    @abstractmethod
    def _call(self) -> Iterator[Part]:
        """A step within a call: `_kept` is the space before, the marker, and some of the body."""

    @abstractmethod
    def _read_unfinished(self, held: str) -> Sequence[Part]:
        """What the held text of an unfinished call, with its opening marker, is."""

    def _start(self) -> Iterator[Part]:
        marker = self._markers.think_open
        body = self._held.lstrip(_SPACE)
        if body.startswith(marker):
            self._enter("reasoning", body.removeprefix(marker))
        elif not marker.startswith(body):
            self._state = "text"
        yield from ()

    def _reason(self) -> Iterator[Part]:
        if self._after_markup:
            self._held = self._held.lstrip("\n")
        close = self._markers.think_close
        split = split_at(self._held, (close, *self._call_opens), space="\n")
        if split.shown:
            self._after_markup = False
            yield Thought(split.shown)
        if split.marker == close:
            self._enter("text", split.rest)
        elif split.marker:
            self._open_call("draft", split)
        else:
            self._held = split.rest

    def _draft(self) -> Iterator[Part]:
        body, marker, rest = self._held.partition(self._markers.think_close)
        if marker:
            yield Thought("".join([*self._kept, body]).rstrip("\n"))
            self._kept = []
            self._enter("text", rest)
        else:
            self._keep_up_to(undecided(body, [self._markers.think_close]))

    def _say(self) -> Iterator[Part]:
        if self._after_markup:
            self._held = self._held.lstrip("\n")
        split = split_at(self._held, self._call_opens, space=_SPACE)
        if split.shown:
            self._after_markup = False
            yield Said(split.shown)
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
    """Text that is no markup."""
    gap: str
    """Space between `shown` and the marker."""
    marker: str
    """The marker that was found; empty when there is none."""
    rest: str
    """What follows the marker; without one, what may be the start of one, with its space."""


def split_at(text: str, markers: Sequence[str], *, space: str) -> Split:
    """Cut `text` at the first of `markers`, or where one may have begun."""
    if not markers:
        return Split(shown=text, gap="", marker="", rest="")
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        shown = text[: undecided(text, markers)].rstrip(space)
        return Split(shown=shown, gap="", marker="", rest=text[len(shown) :])
    at, marker = min(found)
    shown = text[:at].rstrip(space)
    rest = text[at + len(marker) :]
    return Split(shown=shown, gap=text[len(shown) : at], marker=marker, rest=rest)


def undecided(text: str, markers: Sequence[str]) -> int:
    """Where the longest tail of `text` begins that begins one of `markers`."""
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
