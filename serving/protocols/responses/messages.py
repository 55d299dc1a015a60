"""Input items of the responses protocol as messages of a `Conversation`.

An assistant's reasoning, text and calls are separate items in this protocol and one message
everywhere else. Items that follow each other belong to one answer unless their ids say otherwise.
"""

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from onlinerl.serving.interaction.request import Message, Role, ToolCall
from onlinerl.serving.wire.parameters import (
    Parameters,
    WithoutEffect,
    unsupported,
    validate,
    wrong,
)

Item = dict[str, Any]

_OWN_ID = re.compile(r"[a-z]+_([0-9a-f-]{36})_\d+")
_SEALED = "onlinerl.1"
"""Prefix of this gateway's `encrypted_content`."""
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


class _Part(Parameters):
    type: str
    text: str


class _MessageItem(Parameters):
    type: Literal["message"] = "message"
    id: str | None = Field(default=None, max_length=256)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Any]


class _CallItem(Parameters):
    type: Literal["function_call"]
    id: str | None = Field(default=None, max_length=256)
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    arguments: str


class _OutputItem(Parameters):
    type: Literal["function_call_output"]
    id: str | None = Field(default=None, max_length=256)
    call_id: str = Field(min_length=1, max_length=256)
    output: str | list[Any]


class _ReasoningItem(Parameters):
    type: Literal["reasoning"]
    id: str | None = Field(default=None, max_length=256)
    summary: list[Any] = Field(default_factory=list)
    content: list[Any] | None = None
    encrypted_content: str | None = None


_STATUS = ("in_progress", "completed", "incomplete")
_ITEM_WITHOUT_EFFECT: WithoutEffect = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "created_by": (),
    "name": (),
    "namespace": (),
    "phase": (),
    "status": _STATUS,
    "type": (),
}
_CALL_WITHOUT_EFFECT = {
    name: values for name, values in _ITEM_WITHOUT_EFFECT.items() if name != "name"
}
_PART_WITHOUT_EFFECT: WithoutEffect = {
    "annotations": ([],),
    "prompt_cache_breakpoint": (),
}
_KINDS: dict[str, type[Parameters]] = {
    "message": _MessageItem,
    "function_call": _CallItem,
    "function_call_output": _OutputItem,
    "reasoning": _ReasoningItem,
}


def seal(reasoning: str) -> str:
    """`encrypted_content` for a reasoning text: opaque to clients, but not secret."""
    return f"{_SEALED}." + base64.urlsafe_b64encode(reasoning.encode()).decode("ascii")


def messages_of(items: Sequence[object], *, first: int = 0) -> tuple[Message, ...]:
    """The conversation that `items` make up.

    Args:
        items: Parsed JSON, oldest first.
        first: Number of items at the beginning that come from stored responses; error messages
            count the caller's own from 0.

    Raises:
        RequestRefused: an item is wrong or not supported; the error names it.
    """
    builder = _ConversationBuilder()
    for number, item in enumerate(items):
        at = f"input.{number - first}" if number >= first else "previous_response_id"
        builder.add(item, at=at)
    return builder.messages()


def interaction_of(item_id: str | None) -> str | None:
    """The interaction that an item's id names; None for an id that this gateway did not make."""
    match = None if item_id is None else _OWN_ID.fullmatch(item_id)
    return None if match is None else match.group(1)


def normalize_input(value: str | Sequence[Item]) -> tuple[Item, ...]:
    """`input` as a list of items, messages with their type and with parts as content."""
    if isinstance(value, str):
        value = [{"type": "message", "role": "user", "content": value}]
    return tuple(_normalize(item) for item in value)


def _normalize(item: Item) -> Item:
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {"type": "message", **item, "content": [{"type": kind, "text": item["content"]}]}


@dataclass
class _Answer:
    """An assistant's message whose items are being collected."""

    source: str | None
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self.content),
            reasoning="".join(self.reasoning) or None,
            tool_calls=tuple(self.calls),
        )


class _ConversationBuilder:
    """Takes items one after the other and joins those of one answer to one message."""

    def __init__(self) -> None:
        self._done: list[Message] = []
        self._answer: _Answer | None = None
        self._names: dict[str, str] = {}
        """Names of functions by the ids of their calls."""

    def messages(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._done)

    def add(self, item: object, *, at: str) -> None:
        kind = _kind(item, at=at)
        without_effect = _CALL_WITHOUT_EFFECT if kind is _CallItem else _ITEM_WITHOUT_EFFECT
        parsed = validate(kind, item, at=at, without_effect=without_effect)
        if isinstance(parsed, _MessageItem):
            self._add_message(parsed, at=at)
        elif isinstance(parsed, _CallItem):
            self._add_call(parsed)
        elif isinstance(parsed, _OutputItem):
            self._add_output(parsed, at=at)
        elif isinstance(parsed, _ReasoningItem):
            self._add_reasoning(parsed, at=at)

    def _add_message(self, item: _MessageItem, *, at: str) -> None:
        text = _text(item.content, at=f"{at}.content")
        if item.role != "assistant":
            self._close()
            # `developer` is OpenAI's newer word for what chat templates call `system`.
            role: Role = "user" if item.role == "user" else "system"
            self._done.append(Message(role=role, content=text))
            return
        answer = self._open(
            item.id, belongs=lambda answer: not answer.content or bool(answer.calls)
        )
        answer.content.append(text)

    def _add_call(self, item: _CallItem) -> None:
        answer = self._open(item.id, belongs=lambda _: True)
        answer.calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.arguments))
        self._names[item.call_id] = item.name

    def _add_reasoning(self, item: _ReasoningItem, *, at: str) -> None:
        answer = self._open(item.id, belongs=lambda answer: not (answer.content or answer.calls))
        answer.reasoning.append(_reasoning(item, at=at))

    def _add_output(self, item: _OutputItem, *, at: str) -> None:
        self._close()
        name = self._names.get(item.call_id)
        if name is None:
            raise wrong(
                f"{at}.call_id",
                f"no function call {item.call_id!r} comes before this output: send the call too, "
                "or give the response that made it as previous_response_id",
            )
        text = _text(item.output, at=f"{at}.output")
        self._done.append(Message(role="tool", content=text, tool_call_id=item.call_id, name=name))

    def _open(self, item_id: str | None, *, belongs: Callable[[_Answer], bool]) -> _Answer:
        """The answer that an item belongs to.

        Decided by ids where both have one, else by `belongs`, which looks at the open answer.
        """
        source = interaction_of(item_id)
        answer = self._answer
        if answer is not None:
            have_ids = source is not None and answer.source is not None
            if (source == answer.source) if have_ids else belongs(answer):
                answer.source = answer.source or source
                return answer
        self._close()
        self._answer = _Answer(source)
        return self._answer

    def _close(self) -> None:
        if self._answer is not None:
            self._done.append(self._answer.message())
            self._answer = None


def _kind(item: object, *, at: str) -> type[Parameters]:
    if not isinstance(item, dict):
        raise wrong(at, "must be a JSON object")
    name = item.get("type") or "message"
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise unsupported(f"{at}.type", f"{name!r} is not one of {', '.join(_KINDS)}")
    return kind


def _text(content: str | Sequence[object], *, at: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, at=f"{at}.{number}") for number, part in enumerate(content))


def _part_text(part: object, *, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind not in _TEXT_PARTS:
        raise unsupported(f"{at}.type", f"{kind!r} is no text, but this model reads text only")
    # Log-probabilities of an earlier answer change nothing.
    plain = part if not isinstance(part, dict) else {**part, "logprobs": None}
    without_effect = {**_PART_WITHOUT_EFFECT, "logprobs": ()}
    return validate(_Part, plain, at=at, without_effect=without_effect).text


def _reasoning(item: _ReasoningItem, *, at: str) -> str:
    """The sampled text of a reasoning item; a summary is not what the model sampled."""
    if item.content:
        return _text(item.content, at=f"{at}.content")
    sealed = item.encrypted_content
    if sealed is None:
        return ""
    head, _, text = sealed.rpartition(".")
    try:
        if head != _SEALED:
            raise ValueError(head)
        return base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise wrong(
            f"{at}.encrypted_content", "this gateway did not make it; leave the item out"
        ) from error
