"""The one stream that an answer is: pieces of a choice, in the order in which they were sampled.

The gateway makes them from token ids; protocols translate them out (`Wire`). Within one choice:
any number of `ReasoningDelta`, `TextDelta` and tool calls (`ToolCallStart`, then its
`ArgumentsDelta`s, which joined are one whole JSON object), then one `Finish`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onlinerl.serving.interaction.request import ToolCall


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A sampled token, for callers that asked for logprobs."""

    text: str
    token_bytes: bytes
    logprob: float
    top: Sequence["TokenLogprob"] = ()
    """The most likely tokens at this place; their own `top` is empty."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Base of everything in the stream."""

    choice_index: int
    logprobs: Sequence[TokenLogprob] = ()
    """Of the tokens that arrived with this piece; empty unless the caller asked."""


@dataclass(frozen=True, kw_only=True)
class TextDelta(Piece):
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ReasoningDelta(Piece):
    """A piece of what the model thinks."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ToolCallStart(Piece):
    """A tool call begins; `call_index` counts the calls of the choice from 0."""

    call_index: int
    id: str
    name: str


@dataclass(frozen=True, kw_only=True)
class ArgumentsDelta(Piece):
    """A piece of the JSON text of a call's arguments."""

    call_index: int
    json: str


@dataclass(frozen=True, kw_only=True)
class Finish(Piece):
    """The choice has ended: stop, length or tool_calls."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A choice that has ended, whole."""

    choice_index: int
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop, length or tool_calls."""
    stop_string: str | None
    """The stop string that ended the text."""
    num_tokens: int
    """Sampled tokens, as logged."""
    num_reasoning_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine had in its prefix cache; None where it does not tell."""
    logprobs: Sequence[TokenLogprob] = ()
    """Of every sampled token, when the caller asked."""
    pieces: Sequence[Piece] = ()
    """What a reader of the stream was sent, in order."""
