"""Answers of `/v1/completions`, whole and streamed."""

from collections.abc import Sequence

from typing_extensions import override

from onlinerl.errors import EngineFailed
from onlinerl.serving.encoding.json import Body, to_json
from onlinerl.serving.encoding.sse import DONE, event
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Finish, Outcome, Piece, TextDelta, TokenLogprob
from onlinerl.serving.wire.errors import error_event
from onlinerl.serving.wire.openai import usage_body
from onlinerl.serving.wire.protocol import StreamWriter


def completion_body(exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
    """The whole answer."""
    wants_logprobs = exchange.request.top_logprobs is not None
    choices = [
        _choice(
            outcome.choice_index,
            outcome.content,
            logprobs=LegacyLogprobs().of(outcome.logprobs) if wants_logprobs else None,
            finish_reason=outcome.finish_reason,
        )
        for outcome in outcomes
    ]
    return {**_head(exchange), "choices": choices, "usage": usage_body(exchange, outcomes)}


class CompletionWriter(StreamWriter):
    """Writes the events of one stream."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        num_choices = exchange.request.num_choices
        self._logprobs = [LegacyLogprobs() for _ in range(num_choices)]

    @override
    def open(self) -> bytes:
        return b""

    @override
    def write(self, piece: Piece) -> bytes:
        finish = piece.reason if isinstance(piece, Finish) else None
        text = piece.text if isinstance(piece, TextDelta) else ""
        if not text and not piece.logprobs and finish is None:
            return b""
        index = piece.choice_index
        logprobs = self._logprobs[index].of(piece.logprobs) if piece.logprobs else None
        choice = _choice(index, text, logprobs=logprobs, finish_reason=finish)
        body: Body = {**_head(self._exchange), "choices": [choice]}
        if self._exchange.request.include_usage:
            body["usage"] = None
        return event(to_json(body))

    @override
    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        if not self._exchange.request.include_usage:
            return event(DONE)
        usage = usage_body(self._exchange, outcomes)
        counts = {**_head(self._exchange), "choices": [], "usage": usage}
        return event(to_json(counts)) + event(DONE)

    @override
    def fail(self, failure: EngineFailed) -> bytes:
        return error_event(failure)


class LegacyLogprobs:
    """Log-probabilities of one choice as four parallel lists. Make one for each choice."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, logprobs: Sequence[TokenLogprob]) -> Body:
        """The next tokens. `text_offset` counts characters from the beginning of the answer."""
        offsets: list[int] = []
        for each in logprobs:
            offsets.append(self._offset)
            self._offset += len(each.text)
        return {
            "tokens": [each.text for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [
                {other.text: other.logprob for other in each.top} if each.top else None
                for each in logprobs
            ],
            "text_offset": offsets,
        }


def _head(exchange: Exchange) -> Body:
    return {
        "id": f"cmpl-{exchange.interaction_id}",
        "object": "text_completion",
        "created": int(exchange.served_at.timestamp()),
        "model": exchange.policy,
        "system_fingerprint": exchange.policy_version,
    }


def _choice(index: int, text: str, *, logprobs: Body | None, finish_reason: str | None) -> Body:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
