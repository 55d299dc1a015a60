"""Anthropic's messages protocol as a `Wire`: blocks in, blocks and their events out.

`messages_body` and `messages_blocks` read, `messages_output` writes.
"""

from collections.abc import Sequence
from dataclasses import replace

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.encoding.json import to_json
from onlinerl.serving.encoding.sse import named_event
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Outcome, Piece
from onlinerl.serving.interaction.request import Conversation, Request
from onlinerl.serving.protocols.messages.blocks import messages_of
from onlinerl.serving.protocols.messages.body import (
    CountBody,
    read_body,
    read_count,
    tool_choice_of,
    tools_of,
)
from onlinerl.serving.protocols.messages.output import ContentBlocks, Event
from onlinerl.serving.wire.parameters import sampling
from onlinerl.serving.wire.protocol import Asked, Body, StreamWriter

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWire:
    """`/v1/messages`."""

    async def read(self, asked: Asked) -> Request:
        """A checked request."""
        body = read_body(asked.body)
        shape = _request(
            body,
            sampling=sampling(
                asked.config.sampling,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                max_tokens=body.max_tokens,
                stop=body.stop_sequences,
            ),
        )
        user = None if body.metadata is None else body.metadata.user_id
        return replace(shape, stream=bool(body.stream), user=user)

    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        """The message."""
        (outcome,) = outcomes
        content = ContentBlocks()
        for piece in outcome.pieces:
            content.add(piece)
        content.close()
        return {
            **_message(exchange, num_output_tokens=outcome.num_tokens),
            "content": content.blocks,
            **_ending(outcome),
        }

    def writer(self, exchange: Exchange) -> StreamWriter:
        """For a message that streams."""
        return MessagesWriter(exchange)

    async def ended(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        """Nothing is kept: every request of this protocol brings its whole conversation."""

    def error(self, error: RequestRefused | EngineFailed) -> Body:
        """Anthropic's error envelope."""
        return error_body(error)


class MessagesWriter:
    """A streamed message."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._content = ContentBlocks()

    def open(self) -> bytes:
        """The message before anything was said."""
        message = _message(self._exchange, num_output_tokens=0)
        return _lines([{"type": "message_start", "message": message}])

    def write(self, piece: Piece) -> bytes:
        """What one piece makes known."""
        return _lines(self._content.add(piece))

    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        """The end of the open block, why the message ended, and the counts."""
        (outcome,) = outcomes
        delta = {
            "type": "message_delta",
            "delta": _ending(outcome),
            "usage": {
                "input_tokens": len(self._exchange.prompt_ids),
                "output_tokens": outcome.num_tokens,
            },
        }
        return _lines([*self._content.close(), delta, {"type": "message_stop"}])

    def fail(self, failure: EngineFailed) -> bytes:
        """The error event, after which the stream ends."""
        return _lines([error_body(failure)])


_THREAD = "thread"


def read_counted(value: object) -> Request:
    """What a `count_tokens` body asks about.

    Raises:
        RequestRefused: naming the parameter that is wrong or not supported.
    """
    return _request(read_count(value), sampling=Sampling())


def error_body(error: RequestRefused | EngineFailed) -> Body:
    """An error as Anthropic's clients read it."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    param = error.param if isinstance(error, RequestRefused) else None
    # This envelope has no field for the parameter, so the message names it.
    named = param is None or param in error.message
    message = error.message if named else f"{param}: {error.message}"
    body: Body = {"type": _KINDS.get(error.status, kind), "message": message}
    if param == _THREAD:
        # Anthropic's tool runner asks for a thread first, and goes on without one when told so.
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
    return {"type": "error", "error": body}


def _request(body: CountBody, *, sampling: Sampling) -> Request:
    tools = tools_of(body)
    return Request(
        protocol="anthropic.messages",
        model=body.model,
        prompt=Conversation(
            messages=messages_of(body.system, body.messages), tools=tools, thinking=body.thinks
        ),
        sampling=sampling,
        tool_choice=tool_choice_of(body, tools),
        format=body.json_format,
    )


def _message(exchange: Exchange, *, num_output_tokens: int) -> Body:
    """A message without content; its id tells the interaction that it is logged as."""
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


def _ending(outcome: Outcome) -> dict[str, str | None]:
    reason = _STOP_REASONS.get(outcome.finish_reason, "end_turn")
    if reason == "end_turn" and outcome.stop_string is not None:
        reason = "stop_sequence"
    stop = outcome.stop_string if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stop}


def _lines(events: Sequence[Event]) -> bytes:
    return b"".join(named_event(event["type"], to_json(event)) for event in events)
