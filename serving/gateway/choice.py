"""One completion being sampled: its tokens as sampled, and its pieces as shown to the caller."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from onlinerl.rollout_store.version_spans import clip_spans
from onlinerl.serving.gateway.logprob_view import LogprobView
from onlinerl.serving.interaction.engine import Chunk, Generate
from onlinerl.serving.interaction.pieces import (
    ArgumentsDelta,
    Finish,
    Outcome,
    Piece,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
)
from onlinerl.serving.interaction.request import Message, ToolCall
from onlinerl.serving.interaction.sampled import Sampled
from onlinerl.serving.parsing.output_parser import OutputParser

WHOLE = ("stop", "length", "tool_calls")
"""Finish reasons of an answer that reached its end."""


class Choice:
    """Takes the chunks of an engine, in order, until one of them has a finish reason.

    Args:
        request: The request to the engine.
        index: Index of this choice among those of the answer.
        parser: Parses its tokens.
        parallel_calls: Whether there may be more than one call; if not, the answer ends before the
            second one.
        view: How log-probabilities are shown; None shows none.
    """

    def __init__(
        self,
        request: Generate,
        *,
        index: int,
        parser: OutputParser,
        parallel_calls: bool = True,
        view: LogprobView | None = None,
    ) -> None:
        self.request = request
        self.sampled = Sampled(choice_index=index)
        self.num_cached_tokens: int | None = None
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._view = view
        self._held: list[TokenLogprob] = []
        """Log-probabilities of tokens whose text is not shown yet."""
        self._shown_logprobs: list[TokenLogprob] = []
        self._shown: list[Piece] = []
        self._has_second_call = False

    @property
    def is_cut(self) -> bool:
        """Whether the gateway ended the answer, at a stop string or before a second call."""
        return self._has_second_call or self._parser.cut_at is not None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is sampled for it."""
        return self.sampled.finish_reason is not None

    @property
    def message(self) -> Message:
        """The answer as it was shown."""
        return Message(
            role="assistant",
            content=self._content(),
            reasoning=self._reasoning(),
            tool_calls=self._calls(),
        )

    @property
    def outcome(self) -> Outcome:
        """The answer in the form that protocols write, for a choice that has ended."""
        return Outcome(
            choice_index=self.sampled.choice_index,
            content=self._content(),
            reasoning=self._reasoning(),
            tool_calls=self._calls(),
            finish_reason=self.sampled.finish_reason or "error",
            stop_string=self._parser.cut_at,
            num_tokens=len(self.sampled.token_ids),
            num_reasoning_tokens=self._parser.num_reasoning_tokens,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=self._shown_logprobs,
            pieces=self._shown,
        )

    def take(self, chunk: Chunk) -> list[Piece]:
        """Keep what an engine sent, and return what to show.

        Tokens after the one at which the gateway ends the answer are not served and not kept.
        """
        pieces: list[Piece] = []
        sampled, push = self.sampled.token_ids, self._parser.push
        is_plain = self._view is None and self._parallel_calls
        num_kept = 0
        for token_id in chunk.token_ids:
            if self.is_cut:
                break
            sampled.append(token_id)
            pieces += push(token_id) if is_plain else self._read(token_id, chunk, at=num_kept)
            num_kept += 1
        self.sampled.logprobs += chunk.logprobs[:num_kept]
        if chunk.routed_experts is not None:
            self.sampled.routed_experts = chunk.routed_experts
        if chunk.num_cached_tokens is not None:
            self.num_cached_tokens = chunk.num_cached_tokens
        if chunk.finish_reason is not None:
            pieces += self._end(chunk.finish_reason, chunk)
        shown = merge_pieces(pieces)
        self._shown += shown
        return shown

    def _read(self, token_id: int, chunk: Chunk, *, at: int) -> Sequence[Piece]:
        pieces = self._visible(self._parser.push(token_id))
        if self._view is None:
            return pieces
        logprobs, top = chunk.logprobs, chunk.top_logprobs
        self._held.append(
            self._view.of(
                token_id,
                logprobs[at] if at < len(logprobs) else math.nan,
                top[at] if at < len(top) else (),
            )
        )
        return self._with_logprobs(pieces)

    def _with_logprobs(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """The pieces; the first one carries the log-probabilities that were held back."""
        if not pieces or not self._held:
            return pieces
        held, self._held = self._held, []
        self._shown_logprobs += held
        return [replace(pieces[0], logprobs=held), *pieces[1:]]

    def _visible(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        if self._parallel_calls:
            return pieces
        for position, piece in enumerate(pieces):
            if isinstance(piece, ToolCallStart) and piece.call_index > 0:
                self._has_second_call = True
                return pieces[:position]
        return pieces

    def _end(self, reason: str, chunk: Chunk) -> Sequence[Piece]:
        sampled = self.sampled
        if chunk.version_spans is not None:
            num_tokens = len(sampled.token_ids)
            sampled.version_spans = clip_spans(chunk.version_spans, num_tokens=num_tokens)
        is_whole = self._finish_reason(reason) in WHOLE
        last: Sequence[Piece] = []
        if is_whole and not self._has_second_call:
            last = self._visible(self._parser.end())
        # Only now are all calls known; if parsing them raises, the answer has not ended.
        sampled.finish_reason = self._finish_reason(reason)
        if not is_whole:
            return []
        finish = Finish(choice_index=sampled.choice_index, reason=sampled.finish_reason)
        return self._with_logprobs([*last, finish])

    def _finish_reason(self, reason: str) -> str:
        if reason != "stop" and not self.is_cut:
            return reason
        return "tool_calls" if self._calls() else "stop"

    def _content(self) -> str:
        if not self._has_second_call:
            return self._parser.content
        # The parser may have read past the call that is not shown.
        return "".join([piece.text for piece in self._shown if isinstance(piece, TextDelta)])

    def _reasoning(self) -> str | None:
        if not self._has_second_call:
            return self._parser.reasoning
        texts = [piece.text for piece in self._shown if isinstance(piece, ReasoningDelta)]
        return "".join(texts) if texts else None

    def _calls(self) -> tuple[ToolCall, ...]:
        calls = self._parser.tool_calls
        return calls if self._parallel_calls else calls[:1]


def merge_pieces(pieces: list[Piece]) -> list[Piece]:
    """Merge neighbouring pieces of the same kind, so that the stream has as few as possible."""
    if len(pieces) < 2:
        return pieces
    result: list[Piece] = []
    for _, neighbours in groupby(pieces, key=_kind):
        group = list(neighbours)
        result += group if len(group) == 1 else _merge_group(group)
    return result


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    """What neighbouring pieces have in common when they may be merged."""
    return type(piece), piece.call_index if isinstance(piece, ArgumentsDelta) else 0


def _merge_group(group: list[Piece]) -> list[Piece]:
    first = group[0]
    logprobs = [each for piece in group for each in piece.logprobs]
    if isinstance(first, TextDelta | ReasoningDelta):
        text = "".join([piece.text for piece in group if isinstance(piece, type(first))])
        return [replace(first, text=text, logprobs=logprobs)]
    if isinstance(first, ArgumentsDelta):
        arguments = "".join([piece.json for piece in group if isinstance(piece, ArgumentsDelta)])
        return [replace(first, json=arguments, logprobs=logprobs)]
    return group
