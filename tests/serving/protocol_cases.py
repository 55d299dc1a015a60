"""Requests, answers and their pieces made by hand, for tests of one protocol at a time."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from onlinerl.rollout_store.schema import RendererName
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.interaction.exchange import Exchange, Lineage
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
from onlinerl.serving.interaction.request import Request, ToolCall
from onlinerl.serving.wire.protocol import IncomingRequest, StreamWriter

SOURCE = "01890000-0000-7000-8000-000000000001"
"""Id of the interaction that an exchange has by default."""
WEATHER: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}


def caller(**changes: Any) -> Caller:
    return Caller(**{"name": "acme", "tenant": "acme", "consent": "train", **changes})


def asked(
    body: object, *, headers: dict[str, str] | None = None, **changes: Any
) -> IncomingRequest:
    return IncomingRequest(
        body=body, headers=headers or {}, caller=caller(**changes), config=GatewayConfig()
    )


def exchange(request: Request, **changes: Any) -> Exchange:
    values = {
        "interaction_id": SOURCE,
        "caller": caller(),
        "consent": "train",
        "request": request,
        "sampling": request.sampling,
        "user": None,
        "prompt_ids": [1, 2, 3],
        "lineage": Lineage(session_id="session-1"),
        "policy": "assistant",
        "version": lambda: "assistant/1",
        "renderer": RendererName(name="test", hash="00"),
        "served_at": datetime(2026, 1, 2, tzinfo=UTC),
        "started": 0.0,
    }
    return Exchange(**{**values, **changes})


def said(text: str, *logprobs: TokenLogprob) -> TextDelta:
    return TextDelta(choice_index=0, text=text, logprobs=logprobs)


def thought(text: str) -> ReasoningDelta:
    return ReasoningDelta(choice_index=0, text=text)


def called(number: int, name: str, *arguments: str) -> list[Piece]:
    start = ToolCallStart(choice_index=0, call_index=number, id=f"call_{number}", name=name)
    return [
        start,
        *(ArgumentsDelta(choice_index=0, call_index=number, json=piece) for piece in arguments),
    ]


def outcome(*pieces: Piece, finish: str = "stop", **changes: Any) -> Outcome:
    """The answer that `pieces` are."""
    starts = [piece for piece in pieces if isinstance(piece, ToolCallStart)]
    calls = tuple(
        ToolCall(id=start.id, name=start.name, arguments=_arguments(pieces, start.call_index))
        for start in starts
    )
    values = {
        "choice_index": 0,
        "content": "".join(piece.text for piece in pieces if isinstance(piece, TextDelta)),
        "reasoning": "".join(p.text for p in pieces if isinstance(p, ReasoningDelta)) or None,
        "tool_calls": calls,
        "finish_reason": finish,
        "stop_string": None,
        "num_tokens": 7,
        "pieces": pieces,
    }
    return Outcome(**{**values, **changes})


def streamed(writer: StreamWriter, ended: Outcome) -> list[dict[str, Any]]:
    """The events of an answer."""
    data = [writer.open()]
    data += [writer.write(piece) for piece in ended.pieces]
    data += [writer.write(Finish(choice_index=0, reason=ended.finish_reason))]
    return events(b"".join([*data, writer.close([ended])]))


def events(stream: bytes) -> list[dict[str, Any]]:
    """Server-sent events, each named as its data says."""
    *blocks, rest = stream.split(b"\n\n")
    assert rest == b""
    result = []
    for block in blocks:
        name, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        result.append(event)
    return result


def _arguments(pieces: Sequence[Piece], call_index: int) -> str:
    return "".join(
        piece.json
        for piece in pieces
        if isinstance(piece, ArgumentsDelta) and piece.call_index == call_index
    )
