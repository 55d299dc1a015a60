"""Items of the responses protocol: what they may hold, and the messages that they are.

An assistant's reasoning, text and calls are separate items in this protocol and one message
everywhere else; items that follow each other belong to one answer unless their ids say otherwise.
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from onlinerl.serving.interaction.request import Message, Role, ToolCall
from onlinerl.serving.wire.parameters import Parameters, checked, unsupported, wrong

Item = dict[str, Any]

_OWN_ID = re.compile(r"[a-z]+_([0-9a-f-]{36})_\d+")
_SEALED = "onlinerl.1"
"""Begins what `encrypted_content` is here."""


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
_ITEM_ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "created_by": (),
    "name": (),
    "namespace": (),
    "phase": (),
    "status": _STATUS,
    "type": (),
}
_CALL_ASKS_FOR_NOTHING = {
    name: values for name, values in _ITEM_ASKS_FOR_NOTHING.items() if name != "name"
}
_PART_ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
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
    """What `encrypted_content` holds: the reasoning, opaque to clients but no secret."""
    return f"{_SEALED}." + base64.urlsafe_b64encode(reasoning.encode()).decode("ascii")


def messages_of(items: Sequence[object], *, first: int = 0) -> tuple[Message, ...]:
    """The conversation that `items` are.

    Args:
        items: parsed JSON, oldest first.
        first: how many of them come from stored responses; the caller's own count from there.

    Raises:
        RequestRefused: naming the item that is wrong or not supported.
    """
    turns = _Turns()
    for number, item in enumerate(items):
        turns.add(item, at=f"input.{number - first}" if number >= first else "previous_response_id")
    return turns.messages()


def own_source(item_id: str | None) -> str | None:
    """The interaction that made an item, when this gateway named it."""
    match = None if item_id is None else _OWN_ID.fullmatch(item_id)
    return None if match is None else match.group(1)


def normal_input(given: str | Sequence[Item]) -> tuple[Item, ...]:
    """Input as a list of items, each with its type and its content as parts."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    return tuple(_normal(item) for item in given)


def _normal(item: Item) -> Item:
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
        return item
    kind = "output_text" if item.get("role") == "assistant" else "input_text"
    return {"type": "message", **item, "content": [{"type": kind, "text": item["content"]}]}


@dataclass
class _Answer:
    """An assistant's message on its way."""

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


class _Turns:
    """Items in, messages out."""

    def __init__(self) -> None:
        self._done: list[Message] = []
        self._answer: _Answer | None = None
        self._names: dict[str, str] = {}
        """Of functions, by the ids of their calls."""

    def messages(self) -> tuple[Message, ...]:
        self._close()
        return tuple(self._done)

    def add(self, item: object, *, at: str) -> None:
        kind = _kind(item, at=at)
        harmless = _CALL_ASKS_FOR_NOTHING if kind is _CallItem else _ITEM_ASKS_FOR_NOTHING
        given = checked(kind, item, at=at, harmless=harmless)
        if isinstance(given, _MessageItem):
            self._add_message(given, at=at)
        elif isinstance(given, _CallItem):
            self._add_call(given)
        elif isinstance(given, _OutputItem):
            self._add_output(given, at=at)
        elif isinstance(given, _ReasoningItem):
            self._add_reasoning(given, at=at)

    def _add_message(self, item: _MessageItem, *, at: str) -> None:
        text = _text(item.content, at=f"{at}.content")
        if item.role != "assistant":
            self._close()
            # `developer` is OpenAI's newer word for what chat templates call `system`.
            role: Role = "user" if item.role == "user" else "system"
            self._done.append(Message(role=role, content=text))
            return
        answer = self._open(item.id, goes_on=lambda open_: not open_.content or bool(open_.calls))
        answer.content.append(text)

    def _add_call(self, item: _CallItem) -> None:
        answer = self._open(item.id, goes_on=lambda _: True)
        answer.calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.arguments))
        self._names[item.call_id] = item.name

    def _add_reasoning(self, item: _ReasoningItem, *, at: str) -> None:
        answer = self._open(item.id, goes_on=lambda open_: not (open_.content or open_.calls))
        answer.reasoning.append(_reasoning(item, at=at))

    def _add_output(self, item: _OutputItem, *, at: str) -> None:
        self._close()
        name = self._names.get(item.call_id)
        if name is None:
            raise wrong(
                f"{at}.call_id",
                f"no function call {item.call_id!r} comes before this output: send the call too, "
                "or name the response that made it in previous_response_id",
            )
        text = _text(item.output, at=f"{at}.output")
        self._done.append(Message(role="tool", content=text, tool_call_id=item.call_id, name=name))

    def _open(self, item_id: str | None, *, goes_on: Callable[[_Answer], bool]) -> _Answer:
        """The answer that an item belongs to: by its id, else by what came before it."""
        source = own_source(item_id)
        answer = self._answer
        if answer is not None:
            known = source is not None and answer.source is not None
            if (source == answer.source) if known else goes_on(answer):
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
        raise unsupported(f"{at}.type", f"{kind!r} is no text, and this model reads only text")
    # What was said about the tokens of an earlier answer changes nothing about the next.
    plain = part if not isinstance(part, dict) else {**part, "logprobs": None}
    harmless = {**_PART_ASKS_FOR_NOTHING, "logprobs": ()}
    return checked(_Part, plain, at=at, harmless=harmless).text


def _reasoning(item: _ReasoningItem, *, at: str) -> str:
    """The reasoning itself; a summary is not what the model thought."""
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
        raise wrong(f"{at}.encrypted_content", "it was not made by this gateway") from error
