"""Answers of `/v1/messages`, whole and streamed."""

from collections.abc import Sequence

from typing_extensions import override

from onlinerl.errors import EngineFailed
from onlinerl.serving.encoding.json import Body, to_json
from onlinerl.serving.encoding.sse import named_event
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome, Piece
from onlinerl.serving.protocols.messages.errors import error_body
from onlinerl.serving.protocols.messages.output_blocks import ContentBlocks, Event
from onlinerl.serving.wire.protocol import StreamWriter

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def message_body(exchange: Exchange, outcome: Outcome) -> Body:
    """The whole answer."""
    content = ContentBlocks()
    for piece in outcome.pieces:
        content.add(piece)
    content.close()
    return {
        **_empty_message(exchange, num_output_tokens=outcome.num_tokens),
        "content": content.blocks,
        **_stop(outcome),
    }


class MessagesWriter(StreamWriter):
    """Writes the events of one stream."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._content = ContentBlocks()

    @override
    def open(self) -> bytes:
        message = _empty_message(self._exchange, num_output_tokens=0)
        return _encode([{"type": "message_start", "message": message}])

    @override
    def write(self, piece: Piece) -> bytes:
        return _encode(self._content.add(piece))

    @override
    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        (outcome,) = outcomes
        delta = {
            "type": "message_delta",
            "delta": _stop(outcome),
            "usage": {
                "input_tokens": len(self._exchange.prompt_ids),
                "output_tokens": outcome.num_tokens,
            },
        }
        return _encode([*self._content.close(), delta, {"type": "message_stop"}])

    @override
    def fail(self, failure: EngineFailed) -> bytes:
        return _encode([error_body(failure)])


def _empty_message(exchange: Exchange, *, num_output_tokens: int) -> Body:
    """A message without content; its id holds the id of the interaction."""
    return {
        "id": f"msg_{exchange.interaction_id}",
        "type": "message",
        "role": "assistant",
        "model": exchange.policy,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": len(exchange.prompt_ids), "output_tokens": num_output_tokens},
    }


def _stop(outcome: Outcome) -> dict[str, str | None]:
    reason = _STOP_REASONS.get(outcome.finish_reason, "end_turn")
    if reason == "end_turn" and outcome.stop_string is not None:
        reason = "stop_sequence"
    stop = outcome.stop_string if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stop}


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join(named_event(event["type"], to_json(event)) for event in events)
