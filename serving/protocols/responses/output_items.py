"""Pieces of an answer as output items and their events.

Whole and streamed answers both use this code, so they cannot differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from onlinerl.serving.interaction.pieces import (
    ArgumentsDelta,
    Piece,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
)
from onlinerl.serving.protocols.responses.messages import Item, seal

Event = dict[str, Any]
"""An event without its sequence number."""

Status = Literal["completed", "incomplete"]


class OutputItems:
    """The items of one answer, in the order in which the model wrote them.

    NONE ──a piece──► OPEN ──a piece of another kind, or `close`──► finished, in `items`

    Args:
        source: Id of the interaction; items are called `msg_{source}_{index}` and the like.
        sealed: Whether reasoning items carry `encrypted_content`.
    """

    def __init__(self, *, source: str, sealed: bool = False) -> None:
        self.items: list[Item] = []
        """Finished items."""
        self._source = source
        self._sealed = sealed
        self._open: Item | None = None
        self._pieces: list[str] = []
        """Text of the open item so far, in pieces."""
        self._logprobs: list[Mapping[str, object]] = []
        self._held: list[Mapping[str, object]] = []
        """Log-probabilities of tokens without text, held until the next text."""

    def add(self, piece: Piece) -> Sequence[Event]:
        """The events of one piece; may be none."""
        if isinstance(piece, TextDelta):
            return self._add_text(piece)
        if isinstance(piece, ReasoningDelta):
            return self._add_reasoning(piece.text)
        if isinstance(piece, ToolCallStart):
            return self._start_call(piece)
        if isinstance(piece, ArgumentsDelta):
            return self._add_arguments(piece.json)
        return []

    def close(self, status: Status) -> Sequence[Event]:
        """The events that end the answer; an empty answer gets an empty message."""
        events = [] if self.items or self._open else self._open_message()
        return [*events, *self._finish(status)]

    def _add_text(self, piece: TextDelta) -> list[Event]:
        self._held += [logprob_body(logprob) for logprob in piece.logprobs]
        if not piece.text and not self._is_open("message"):
            return []
        events = [] if self._is_open("message") else self._open_message()
        logprobs, self._held = self._held, []
        if not piece.text and not logprobs:
            return events
        self._pieces.append(piece.text)
        self._logprobs += logprobs
        shown = [_without_bytes(logprob) for logprob in logprobs]
        delta = self._event("output_text.delta", content_index=0, delta=piece.text, logprobs=shown)
        return [*events, delta]

    def _add_reasoning(self, text: str) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if not self._is_open("reasoning"):
            events += self._start({"type": "reasoning", "summary": [], "content": []}, prefix="rs")
            part = {"type": "reasoning_text", "text": ""}
            events.append(self._event("content_part.added", content_index=0, part=part))
        self._pieces.append(text)
        return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def _start_call(self, piece: ToolCallStart) -> list[Event]:
        call = {"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": ""}
        return self._start(call, prefix="fc")

    def _add_arguments(self, json: str) -> list[Event]:
        self._pieces.append(json)
        return [self._event("function_call_arguments.delta", delta=json)] if json else []

    def _open_message(self) -> list[Event]:
        started = self._start({"type": "message", "role": "assistant", "content": []}, prefix="msg")
        part = _text_part("", [])
        return [*started, self._event("content_part.added", content_index=0, part=part)]

    def _start(self, item: Item, *, prefix: str) -> list[Event]:
        events = self._finish("completed")
        item_id = f"{prefix}_{self._source}_{len(self.items)}"
        self._open = {"id": item_id, **item, "status": "in_progress"}
        self._pieces, self._logprobs = [], []
        if item["type"] != "message":
            self._held = []
        return [*events, self._item_event("output_item.added")]

    def _finish(self, status: Status) -> list[Event]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        events = self._close_content()
        self._open["status"] = status
        events.append(self._item_event("output_item.done"))
        self.items.append(self._open)
        self._open = None
        return events

    def _close_content(self) -> list[Event]:
        """Put the whole content into the open item; the events that announce it."""
        item, text = self._item(), "".join(self._pieces)
        if item["type"] == "function_call":
            item["arguments"] = text
            return [self._event("function_call_arguments.done", arguments=text)]
        if item["type"] == "reasoning":
            part: Item = {"type": "reasoning_text", "text": text}
            done = self._event("reasoning_text.done", content_index=0, text=text)
            if self._sealed:
                item["encrypted_content"] = seal(text)
        else:
            part = _text_part(text, self._logprobs)
            shown = [_without_bytes(logprob) for logprob in self._logprobs]
            done = self._event("output_text.done", content_index=0, text=text, logprobs=shown)
        item["content"] = [part]
        return [done, self._event("content_part.done", content_index=0, part=part)]

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _item(self) -> Item:
        assert self._open is not None, "a piece of an item came before its start"
        return self._open

    def _item_event(self, name: str) -> Event:
        # A copy, because the item changes later and the event must not.
        item = dict(self._item())
        return {"type": f"response.{name}", "output_index": len(self.items), "item": item}

    def _event(self, name: str, **values: object) -> Event:
        place = {"item_id": self._item()["id"], "output_index": len(self.items)}
        return {"type": f"response.{name}", **place, **values}


def logprob_body(logprob: TokenLogprob) -> dict[str, object]:
    """A token as OpenAI shows it."""
    return {
        **_token_body(logprob),
        "top_logprobs": [_token_body(likely) for likely in logprob.top],
    }


def _token_body(logprob: TokenLogprob) -> dict[str, object]:
    return {
        "token": logprob.text,
        "bytes": list(logprob.token_bytes),
        "logprob": logprob.logprob,
    }


def _without_bytes(logprob: Mapping[str, Any]) -> dict[str, object]:
    """The shorter form that events have."""
    return {
        "token": logprob["token"],
        "logprob": logprob["logprob"],
        "top_logprobs": [
            {"token": likely["token"], "logprob": likely["logprob"]}
            for likely in logprob["top_logprobs"]
        ],
    }


def _text_part(text: str, logprobs: Sequence[Mapping[str, object]]) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
