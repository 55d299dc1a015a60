"""How each family of `renderers` marks reasoning and calls in its answers.

This is enough to show text as it comes. Calls are read by the family's own parser.
"""

# ruff: noqa: RUF001 the markers are spelled with these characters

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from onlinerl.serving.parsing.tagged_text import Markers


@dataclass(frozen=True, kw_only=True)
class TagMarkup:
    """Markup of families that reason between two markers and then answer."""

    markers: Markers = field(default_factory=Markers)
    inner: tuple[str, ...] = ("</tool_call>",)
    """Markers within calls, which are never shown as text."""
    bare_calls: bool = False
    """Whether a call is an answer that is one JSON object without a marker."""

    @property
    def reasons(self) -> bool:
        """Whether models of the family may reason."""
        return bool(self.markers.think_open)

    @property
    def reasoning_headers(self) -> tuple[str, ...]:
        """Texts that reasoning may begin with."""
        return (self.markers.think_open,) if self.reasons else ()

    @property
    def reasoning_ends(self) -> tuple[str, ...]:
        """Texts that reasoning may end with."""
        return (self.markers.think_close,) if self.reasons else ()

    @property
    def empty_thoughts(self) -> tuple[str, ...]:
        """Texts that an answer without reasoning may begin with."""
        markers = self.markers
        return ("", markers.think_close, markers.think_open + markers.think_close)

    @property
    def shown(self) -> frozenset[str]:
        """Markers that are spelled out if they are tokens of their own."""
        markers = self.markers
        return frozenset(
            {markers.think_open, markers.think_close, *markers.call_opens, *self.inner}
        )


@dataclass(frozen=True, kw_only=True)
class ChannelMarkup:
    """Markup of families whose answers are messages, each with a header that names its channel."""

    headers: Mapping[str, Literal["text", "reasoning"]]
    """Whole headers; a message with any other header is a call."""
    ends: tuple[str, ...]
    """Texts that end a message."""
    inner: tuple[str, ...] = ()
    """Markers within the headers of calls."""
    reasons: bool = True

    @property
    def empty_thoughts(self) -> tuple[str, ...]:
        """Texts that an answer without reasoning may begin with."""
        texts = [header for header, what in self.headers.items() if what == "text"]
        return (*texts, *(self.ends[0] + text for text in texts))

    @property
    def reasoning_headers(self) -> tuple[str, ...]:
        """Texts that reasoning may begin with."""
        return tuple(header for header, what in self.headers.items() if what == "reasoning")

    @property
    def reasoning_ends(self) -> tuple[str, ...]:
        """Texts that reasoning may end with."""
        return self.ends

    @property
    def shown(self) -> frozenset[str]:
        """Markers that are spelled out if they are tokens of their own."""
        in_headers = {f"<{part}" for header in self.headers for part in header.split("<")[1:]}
        tokens = {token[: token.find(">") + 1] for token in in_headers}
        return frozenset({*tokens, *self.ends, *self.inner})


FamilyMarkup = TagMarkup | ChannelMarkup

_DEEPSEEK = TagMarkup(
    markers=Markers(call_opens=("<｜tool▁calls▁begin｜>",)),
    inner=(
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
_KIMI = TagMarkup(
    markers=Markers(call_opens=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")),
    inner=(
        "<|tool_calls_section_end|>",
        "<|tool_call_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
)

_OTHERS: Mapping[str, FamilyMarkup] = {
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": TagMarkup(
        markers=Markers(call_opens=("<｜DSML｜",)),
        inner=("｜DSML｜", "</｜DSML｜tool_calls>", "</｜DSML｜toolcalls>", "</｜DSML｜tool>"),
    ),
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "minimax-m2": TagMarkup(
        markers=Markers(call_opens=("<minimax:tool_call>",)), inner=("</minimax:tool_call>",)
    ),
    "hy3": TagMarkup(
        markers=Markers(
            think_open="<think:opensource>",
            think_close="</think:opensource>",
            call_opens=("<tool_calls:opensource>", "<tool_call:opensource>"),
        ),
        inner=(
            "</tool_calls:opensource>",
            "</tool_call:opensource>",
            "<tool_sep:opensource>",
            "<arg_key:opensource>",
            "</arg_key:opensource>",
            "<arg_value:opensource>",
            "</arg_value:opensource>",
        ),
    ),
    "gemma4": TagMarkup(
        markers=Markers(
            think_open="<|channel>thought\n",
            think_close="<channel|>",
            call_opens=("<|tool_call>",),
        ),
        inner=("<|channel>", "<tool_call|>", '<|"|>'),
    ),
    "llama-3": TagMarkup(
        markers=Markers(think_open="", think_close="", call_opens=()), inner=(), bare_calls=True
    ),
    "inkling": ChannelMarkup(
        headers={
            "<|content_text|>": "text",
            "<|content_thinking|>": "reasoning",
            "<|message_model|><|content_text|>": "text",
            "<|message_model|><|content_thinking|>": "reasoning",
        },
        ends=("<|end_message|>",),
        inner=("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
    ),
    "gpt-oss": ChannelMarkup(
        headers={
            "<|start|>assistant<|channel|>analysis<|message|>": "reasoning",
            "<|start|>assistant<|channel|>commentary<|message|>": "text",
            "<|start|>assistant<|channel|>final<|message|>": "text",
            "<|channel|>analysis<|message|>": "reasoning",
            "<|channel|>commentary<|message|>": "text",
            "<|channel|>final<|message|>": "text",
        },
        ends=("<|end|>", "<|return|>", "<|call|>"),
        inner=("<|constrain|>",),
    ),
}


def markup_of(family: str) -> FamilyMarkup:
    """The markup of a family; most reason in `<think>` and call in `<tool_call>`."""
    return _OTHERS.get(family, TagMarkup())
