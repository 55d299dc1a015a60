"""Splits answers of the families of `renderers` into text, reasoning and calls as they come.

Text and reasoning are shown at once. From the first marker of a call on everything is held until
the answer ends; then the family's own parser reads the calls.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from typing_extensions import override

from onlinerl.serving.parsing.family_markup import ChannelMarkup, TagMarkup
from onlinerl.serving.parsing.output_parser import Part, ReasoningPart, Splitter, TextPart
from onlinerl.serving.parsing.tagged_text import AnswerFeatures, TaggedSplitter, split_at

ReadCalls = Callable[[str], Sequence[Part]]
"""Reads the held text, from the first call to the end of the answer, as calls or as text."""


class HeldCallsSplitter(TaggedSplitter):
    """The `Splitter` for `TagMarkup`."""

    def __init__(
        self, features: AnswerFeatures, markup: TagMarkup, *, read_calls: ReadCalls
    ) -> None:
        super().__init__(features, markup.markers)
        self._read_calls = read_calls
        self._may_be_bare = markup.bare_calls and features.tools
        """Whether nothing was shown yet, so that the whole answer may still be one call."""

    def _read_text(self) -> Iterator[Part]:
        if self._may_be_bare:
            body = self._held.lstrip()
            if not body:
                return
            self._may_be_bare = False
            if body.startswith("{"):
                self._state = "call"
                return
        yield from super()._read_text()

    def _read_call(self) -> Iterator[Part]:
        self._keep_up_to(len(self._held))
        yield from ()

    def _read_unfinished(self, held: str) -> Sequence[Part]:
        return self._read_calls(held)


class ChannelSplitter(Splitter):
    """The `Splitter` for `ChannelMarkup`.

    header ──known──► text or reasoning ──end of message──► header ──unknown──► call, to the end
    """

    def __init__(
        self, features: AnswerFeatures, markup: ChannelMarkup, *, read_calls: ReadCalls
    ) -> None:
        self._markup = markup
        self._tools = features.tools
        self._read_calls = read_calls
        self._state: Literal["header", "text", "reasoning", "call"] = (
            "reasoning" if features.starts_reasoning else "header"
        )
        self._held = ""
        self._kept: list[str] = []

    @property
    @override
    def thinking(self) -> bool:
        return self._state == "reasoning"

    @override
    def push(self, text: str) -> Sequence[Part]:
        self._held += text
        parts: list[Part] = []
        before = ("", "")
        while self._held and (self._state, self._held) != before:
            before = (self._state, self._held)
            parts += self._step()
        return parts

    @override
    def end(self) -> Sequence[Part]:
        held = "".join([*self._kept, self._held])
        self._kept, self._held = [], ""
        if not held.strip():
            return []
        if self._state == "reasoning":
            return [ReasoningPart(held)]
        if self._state == "text" or not self._tools:
            return [TextPart(held)]
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
                yield ReasoningPart(split.shown) if self.thinking else TextPart(split.shown)
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
