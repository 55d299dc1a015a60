"""Answers of `/v1/responses`: the response object, whole, and the events of a streamed one."""

from collections.abc import Sequence

from typing_extensions import override

from onlinerl.errors import EngineFailed
from onlinerl.serving.encoding.json import Body, to_json
from onlinerl.serving.encoding.sse import named_event
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome, Piece
from onlinerl.serving.protocols.responses.messages import Item
from onlinerl.serving.protocols.responses.output_items import Event, OutputItems, Status
from onlinerl.serving.protocols.responses.request import request_of
from onlinerl.serving.wire.protocol import StreamWriter


def response_id(exchange: Exchange) -> str:
    """The id of a response; it holds the id of the interaction."""
    return f"resp_{exchange.interaction_id}"


def response_body(exchange: Exchange, outcome: Outcome) -> Body:
    """The whole answer."""
    items, status = _items_of(exchange), _status(outcome)
    for piece in outcome.pieces:
        items.add(piece)
    items.close(status)
    return _response(exchange, items.items, status=status, outcome=outcome)


class ResponsesWriter(StreamWriter):
    """Writes the events of one stream, numbered from 0."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._items = _items_of(exchange)
        self._number = 0

    @override
    def open(self) -> bytes:
        body = _response(self._exchange, [], status="in_progress")
        return self._encode(
            [
                {"type": "response.created", "response": body},
                {"type": "response.in_progress", "response": body},
            ]
        )

    @override
    def write(self, piece: Piece) -> bytes:
        return self._encode(self._items.add(piece))

    @override
    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        (outcome,) = outcomes
        status = _status(outcome)
        ends = self._items.close(status)
        body = _response(self._exchange, self._items.items, status=status, outcome=outcome)
        return self._encode([*ends, {"type": f"response.{status}", "response": body}])

    @override
    def fail(self, failure: EngineFailed) -> bytes:
        error = {"code": "server_error", "message": failure.message}
        body = _response(self._exchange, self._items.items, status="failed") | {"error": error}
        return self._encode(
            [
                {"type": "error", **error, "param": None},
                {"type": "response.failed", "response": body},
            ]
        )

    def _encode(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._encode_one(event) for event in events)

    def _encode_one(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return named_event(event["type"], to_json(numbered))


def _response(
    exchange: Exchange, output: Sequence[Item], *, status: str, outcome: Outcome | None = None
) -> Body:
    """The response object; `outcome` is None before the end of the answer."""
    request = request_of(exchange)
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": response_id(exchange),
        "object": "response",
        "created_at": int(exchange.served_at.timestamp()),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": details,
        "model": exchange.policy,
        "output": list(output),
        **request.echo,
        "temperature": exchange.sampling.temperature,
        "top_p": exchange.sampling.top_p,
        "usage": None if outcome is None else _usage(exchange, outcome),
    }


def _items_of(exchange: Exchange) -> OutputItems:
    return OutputItems(source=exchange.interaction_id, sealed=request_of(exchange).sealed)


def _status(outcome: Outcome) -> Status:
    return "incomplete" if outcome.finish_reason == "length" else "completed"


def _usage(exchange: Exchange, outcome: Outcome) -> Body:
    """Token counts as they are logged."""
    num_input = len(exchange.prompt_ids)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {
            "cached_tokens": outcome.num_cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": outcome.num_tokens,
        "output_tokens_details": {"reasoning_tokens": outcome.num_reasoning_tokens},
        "total_tokens": num_input + outcome.num_tokens,
    }
