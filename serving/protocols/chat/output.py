"""Answers of `/v1/chat/completions`, whole and streamed."""

from collections.abc import Sequence

from typing_extensions import override

from onlinerl.errors import EngineFailed
from onlinerl.serving.encoding.json import Body, to_json
from onlinerl.serving.encoding.sse import DONE, event
from onlinerl.serving.interaction.exchange import Exchange
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
from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.wire.errors import error_event
from onlinerl.serving.wire.openai import usage_body
from onlinerl.serving.wire.protocol import StreamWriter


def completion_body(exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
    """The whole answer."""
    return {
        **_head(exchange, kind="chat.completion"),
        "choices": [
            {
                "index": outcome.choice_index,
                "message": _message(outcome),
                "logprobs": _logprobs(exchange, outcome.logprobs),
                "finish_reason": outcome.finish_reason,
            }
            for outcome in outcomes
        ],
        "usage": usage_body(exchange, outcomes),
    }


class ChatWriter(StreamWriter):
    """Writes the chunks of one stream. The fields that all chunks share are encoded once."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        head = to_json(_head(exchange, kind="chat.completion.chunk"))
        self._before = b"data: " + head[:-1] + b',"choices":'
        with_usage = exchange.request.include_usage
        self._after = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    @override
    def open(self) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        return b"".join(
            self._chunk(index, delta) for index in range(self._exchange.request.num_choices)
        )

    @override
    def write(self, piece: Piece) -> bytes:
        if isinstance(piece, TextDelta):
            delta = b'{"content":%b}' % to_json(piece.text) if piece.text else b"{}"
            if not piece.text and not piece.logprobs:
                return b""
        elif isinstance(piece, ReasoningDelta):
            delta = b'{"reasoning_content":%b}' % to_json(piece.text)
        elif isinstance(piece, Finish):
            return self._chunk(piece.choice_index, b"{}", piece.logprobs, reason=piece.reason)
        else:
            delta = to_json({"tool_calls": [_call_delta(piece)]})
        return self._chunk(piece.choice_index, delta, piece.logprobs)

    @override
    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        done = event(DONE)
        if not self._exchange.request.include_usage:
            return done
        usage = to_json(usage_body(self._exchange, outcomes))
        return b'%b[],"usage":%b}\n\n%b' % (self._before, usage, done)

    @override
    def fail(self, failure: EngineFailed) -> bytes:
        return error_event(failure)

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: Sequence[TokenLogprob] = (),
        *,
        reason: str | None = None,
    ) -> bytes:
        return b'%b[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._before,
            index,
            delta,
            to_json({"content": _tokens(logprobs), "refusal": None}) if logprobs else b"null",
            b"null" if reason is None else to_json(reason),
            self._after,
        )


def _head(exchange: Exchange, *, kind: str) -> Body:
    return {
        "id": f"chatcmpl-{exchange.interaction_id}",
        "object": kind,
        "created": int(exchange.served_at.timestamp()),
        "model": exchange.policy,
        "system_fingerprint": exchange.policy_version,
    }


def _message(outcome: Outcome) -> Body:
    calls = [_call(call) for call in outcome.tool_calls]
    message: Body = {
        "role": "assistant",
        # OpenAI writes null when there are calls and no text.
        "content": None if calls and not outcome.content else outcome.content,
        "refusal": None,
    }
    if outcome.reasoning is not None:
        message["reasoning_content"] = outcome.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(call: ToolCall) -> Body:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_delta(piece: Piece) -> Body:
    if isinstance(piece, ToolCallStart):
        function = {"name": piece.name, "arguments": ""}
        return {"index": piece.call_index, "id": piece.id, "type": "function", "function": function}
    assert isinstance(piece, ArgumentsDelta)
    return {"index": piece.call_index, "function": {"arguments": piece.json}}


def _logprobs(exchange: Exchange, logprobs: Sequence[TokenLogprob]) -> Body | None:
    if exchange.request.top_logprobs is None:
        return None
    return {"content": _tokens(logprobs), "refusal": None}


def _tokens(logprobs: Sequence[TokenLogprob]) -> list[Body]:
    return [
        {**_token(each), "top_logprobs": [_token(other) for other in each.top]} for each in logprobs
    ]


def _token(token: TokenLogprob) -> Body:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.token_bytes)}
