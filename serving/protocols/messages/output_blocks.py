"""Pieces of an answer as content blocks and their events.

Whole and streamed answers both use this code, so they cannot differ.
"""

import json
from collections.abc import Sequence
from typing import Any

from onlinerl.serving.interaction.pieces import (
    ArgumentsDelta,
    Piece,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)
from onlinerl.serving.protocols.messages.messages import Block, sign

Event = dict[str, Any]


class ContentBlocks:
    """The blocks of one answer, in the order in which the model wrote them.

    NONE ──a piece──► OPEN ──a piece of another kind, or `close`──► finished, in `blocks`
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        """Finished blocks."""
        self._open: Block | None = None
        self._pieces: list[str] = []
        """Content of the open block so far, in pieces."""

    def add(self, piece: Piece) -> Sequence[Event]:
        """The events of one piece; may be none."""
        if isinstance(piece, TextDelta) and piece.text:
            return self._add("text", piece.text)
        if isinstance(piece, ReasoningDelta) and piece.text:
            return self._add("thinking", piece.text)
        if isinstance(piece, ToolCallStart):
            call = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            return self._start(call)
        if isinstance(piece, ArgumentsDelta):
            # Sent when the call is whole: clients parse what they have at any moment.
            self._pieces.append(piece.json)
        return []

    def close(self) -> Sequence[Event]:
        """The events that end the answer; call it once, after the last piece."""
        if self._open is None:
            return []
        block, text = self._open, "".join(self._pieces)
        events: list[Event] = []
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
            delta = {"type": "input_json_delta", "partial_json": text or "{}"}
            events.append(self._event("content_block_delta", delta=delta))
        elif block["type"] == "thinking":
            block |= {"thinking": text, "signature": sign(text)}
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.append(self._event("content_block_delta", delta=delta))
        else:
            block["text"] = text
        events.append(self._event("content_block_stop"))
        self.blocks.append(block)
        self._open = None
        return events

    def _add(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            events += self._start({"type": kind, **empty})
        self._pieces.append(text)
        delta = {"type": f"{kind}_delta", kind: text}
        return [*events, self._event("content_block_delta", delta=delta)]

    def _start(self, block: Block) -> list[Event]:
        events = [*self.close()]
        self._open, self._pieces = block, []
        # A copy, because the block changes later and the event must not.
        return [*events, self._event("content_block_start", content_block=dict(block))]

    def _event(self, kind: str, **values: object) -> Event:
        return {"type": kind, "index": len(self.blocks), **values}
