"""An answer as one stream: the pieces of its choices, in the order in which they were sampled.

The gateway makes them from token ids, and a protocol's `Wire` writes them. One choice has any
number of `ReasoningDelta`, `TextDelta` and tool calls (`ToolCallStart`, then `ArgumentsDelta`s that
together are one JSON object), then one `Finish`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onlinerl.serving.interaction.request import ToolCall


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A sampled token, for callers that asked for log-probabilities."""

    text: str
    token_bytes: bytes
    logprob: float
    top: Sequence["TokenLogprob"] = ()
    """The most likely tokens at this place; their own `top` is empty."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Base of all pieces."""

    choice_index: int
    logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of the tokens of this piece; empty unless the caller asked for them."""


@dataclass(frozen=True, kw_only=True)
class TextDelta(Piece):
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ReasoningDelta(Piece):
    """A piece of the model's reasoning."""

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
    """The end of the choice; `reason` is stop, length or tool_calls."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A choice that has ended, as a whole."""

    choice_index: int
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop, length or tool_calls."""
    stop_string: str | None
    """The stop string that ended the text; None when none did."""
    num_tokens: int
    """Sampled tokens, as logged."""
    num_reasoning_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine had in its prefix cache; None when not reported."""
    logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of every sampled token, when the caller asked for them."""
    pieces: Sequence[Piece] = ()
    """The pieces of the stream, in order."""
