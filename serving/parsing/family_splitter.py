"""Answers of the families of `renderers`, told apart as text comes in.

Text and reasoning are shown as they come. From the first marker of a call on everything is held
until the answer ends; then the family's own parser reads the calls.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from onlinerl.serving.parsing.family_markup import ChannelMarkup, TagMarkup
from onlinerl.serving.parsing.output_parser import Part, Said, Thought
from onlinerl.serving.parsing.tagged_text import Expected, TaggedSplitter, split_at

ReadCalls = Callable[[str], Sequence[Part]]
"""What the held text of calls, to the end of the answer, is: calls, or the text itself."""


class HeldCallsSplitter(TaggedSplitter):
    """For `TagMarkup`."""

    def __init__(self, expected: Expected, markup: TagMarkup, *, read_calls: ReadCalls) -> None:
        super().__init__(expected, markup.markers)
        self._read_calls = read_calls
        self._may_be_bare = markup.bare_calls and expected.tools
        """Whether nothing was said yet, so that all of it may still be one call."""

    def _say(self) -> Iterator[Part]:
        if self._may_be_bare:
            body = self._held.lstrip()
            if not body:
                return
            self._may_be_bare = False
            if body.startswith("{"):
                self._state = "call"
                return
        yield from super()._say()

    def _call(self) -> Iterator[Part]:
        self._keep_up_to(len(self._held))
        yield from ()

    def _read_unfinished(self, held: str) -> Sequence[Part]:
        return self._read_calls(held)


class ChannelSplitter:
    """For `ChannelMarkup`.

    header ──known──► text or reasoning ──end of message──► header ──unknown──► call, to the end
    """

    def __init__(self, expected: Expected, markup: ChannelMarkup, *, read_calls: ReadCalls) -> None:
        self._markup = markup
        self._tools = expected.tools
        self._read_calls = read_calls
        self._state: Literal["header", "text", "reasoning", "call"] = (
            "reasoning" if expected.opened else "header"
        )
        self._held = ""
        self._kept: list[str] = []

    @property
    def thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._state == "reasoning"

    def push(self, text: str) -> Sequence[Part]:
        """The parts that `text` decides."""
        self._held += text
        parts: list[Part] = []
        before = ("", "")
        while self._held and (self._state, self._held) != before:
            before = (self._state, self._held)
            parts += self._step()
        return parts

    def end(self) -> Sequence[Part]:
        """What is held back: a message without a known header is a call, or else text."""
        held = "".join([*self._kept, self._held])
        self._kept, self._held = [], ""
        if not held.strip():
            return []
        if self._state == "reasoning":
            return [Thought(held)]
        if self._state == "text" or not self._tools:
            return [Said(held)]
        return self._read_calls(held)

    def _step(self) -> Iterator[Part]:
        if self._state == "header":
            yield from self._read_header()
        elif self._state == "call":
            self._kept.append(self._held)
            self._held = ""
        else:
            split = split_at(self._held, self._markup.ends, space="")
            if split.shown:
                yield Thought(split.shown) if self.thinking else Said(split.shown)
            self._held = split.rest
            if split.marker:
                self._state = "header"

    def _read_header(self) -> Iterator[Part]:
        for header, channel in self._markup.headers.items():
            if self._held.startswith(header):
                self._state = channel
                self._held = self._held.removeprefix(header)
                return
        if any(header.startswith(self._held) for header in self._markup.headers):
            return
        if self._held in self._markup.ends:
            self._held = ""
            return
        self._state = "call" if self._tools else "text"
        yield from ()
