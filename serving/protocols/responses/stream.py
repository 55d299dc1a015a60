"""A streamed response: events in order, each with a number."""

from collections.abc import Sequence

from onlinerl.errors import EngineFailed
from onlinerl.serving.encoding.json import to_json
from onlinerl.serving.encoding.sse import named_event
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome, Piece
from onlinerl.serving.protocols.responses.output import Event
from onlinerl.serving.protocols.responses.response import output_of, response_body, status_of


class ResponsesWriter:
    """A streamed response: events with a number each, from 0."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._output = output_of(exchange)
        self._number = 0

    def open(self) -> bytes:
        """The response before anything was said."""
        body = response_body(self._exchange, [], status="in_progress")
        return self._lines(
            [
                {"type": "response.created", "response": body},
                {"type": "response.in_progress", "response": body},
            ]
        )

    def write(self, piece: Piece) -> bytes:
        """What one piece makes known."""
        return self._lines(self._output.add(piece))

    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        """The end of the open item, and the whole response."""
        (outcome,) = outcomes
        status = status_of(outcome)
        ends = self._output.close(status)
        body = response_body(self._exchange, self._output.items, status=status, outcome=outcome)
        return self._lines([*ends, {"type": f"response.{status}", "response": body}])

    def fail(self, failure: EngineFailed) -> bytes:
        """An error, and the response that failed, with the items that are whole."""
        error = {"code": "server_error", "message": failure.message}
        body = response_body(self._exchange, self._output.items, status="failed") | {"error": error}
        return self._lines(
            [
                {"type": "error", **error, "param": None},
                {"type": "response.failed", "response": body},
            ]
        )

    def _lines(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._line(event) for event in events)

    def _line(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return named_event(event["type"], to_json(numbered))
