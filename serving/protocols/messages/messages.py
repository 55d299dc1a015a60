"""Messages and content blocks of Anthropic's protocol as messages of a `Conversation`.

One message of this protocol may become several: results of tools are blocks of a user message here,
and messages of their own in a `Conversation`.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from onlinerl.errors import RequestRefused
from onlinerl.serving.encoding.json import unescaped_json
from onlinerl.serving.interaction.request import Message, ToolCall
from onlinerl.serving.protocols.messages.body import CACHE_CONTROL
from onlinerl.serving.wire.parameters import (
    Parameters,
    WithoutEffect,
    unsupported,
    validate,
    wrong,
)

Block = dict[str, Any]


class _Message(Parameters):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class _Text(Parameters):
    type: Literal["text"]
    text: str


class _Thinking(Parameters):
    type: Literal["thinking"]
    thinking: str
    signature: str


class _ToolUse(Parameters):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    input: dict[str, Any]


class _ToolResult(Parameters):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: str | list[Any] = ""
    is_error: bool = False


_WITHOUT_EFFECT: WithoutEffect = {
    **CACHE_CONTROL,
    "caller": ({"type": "direct"},),
    "citations": ([],),
    "content": (),
    "is_error": (),
    "toolset_name": (),
}
Kinds = Mapping[str, type[Parameters]]

_USER: Kinds = {"text": _Text, "tool_result": _ToolResult}
_ASSISTANT: Kinds = {"text": _Text, "thinking": _Thinking, "tool_use": _ToolUse}
_SYSTEM: Kinds = {"text": _Text}


def sign(thinking: str) -> str:
    """The signature of a thinking block: opaque to clients, and not checked when it comes back."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode("ascii")


def messages_of(system: object, messages: Sequence[object]) -> tuple[Message, ...]:
    """The conversation of a body, from its `system` and `messages`.

    Raises:
        RequestRefused: a block is wrong or not supported; the error names it.
    """
    result: list[Message] = []
    if system:
        result.append(Message(role="system", content=_text(system, at="system")))
    names: dict[str, str] = {}
    for number, value in enumerate(messages):
        result += _read(value, at=f"messages.{number}", names=names)
    if result[-1].role == "assistant":
        raise unsupported(
            f"messages.{len(messages) - 1}",
            "the caller cannot begin the answer: end with a user message",
        )
    return tuple(result)


def _read(value: object, *, at: str, names: dict[str, str]) -> list[Message]:
    body = validate(_Message, value, at=at)
    at = f"{at}.content"
    if body.role == "system":
        return [Message(role="system", content=_text(body.content, at=at))]
    if body.role == "user":
        return _user_messages(body.content, at=at, names=names)
    message = _assistant_message(body.content, at=at)
    names |= {call.id: call.name for call in message.tool_calls}
    return [message]


def _user_messages(content: str | list[Any], *, at: str, names: dict[str, str]) -> list[Message]:
    """One message for each result of a tool, then one with the text."""
    blocks = _blocks(content, at=at, kinds=_USER)
    results: list[Message] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{at}.{number}"
        if isinstance(block, _Text):
            texts.append(block.text)
        elif isinstance(block, _ToolResult):
            if texts:
                raise wrong(place, "results of tools come before text")
            results.append(_tool_message(block, at=place, names=names))
    if results and not texts:
        return results
    return [*results, Message(role="user", content="\n".join(texts))]


def _tool_message(block: _ToolResult, *, at: str, names: dict[str, str]) -> Message:
    name = names.get(block.tool_use_id)
    if name is None:
        raise wrong(
            f"{at}.tool_use_id", f"no tool_use block {block.tool_use_id!r} comes before this result"
        )
    text = _text(block.content, at=f"{at}.content")
    # Chat templates have no field for a failed call, so the text tells the model.
    content = f"Error: {text}" if block.is_error else text
    return Message(role="tool", content=content, tool_call_id=block.tool_use_id, name=name)


def _assistant_message(content: str | list[Any], *, at: str) -> Message:
    blocks = _blocks(content, at=at, kinds=_ASSISTANT)
    thoughts = [block.thinking for block in blocks if isinstance(block, _Thinking)]
    return Message(
        role="assistant",
        content="".join(block.text for block in blocks if isinstance(block, _Text)),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(
            ToolCall(id=block.id, name=block.name, arguments=unescaped_json(block.input))
            for block in blocks
            if isinstance(block, _ToolUse)
        ),
    )


def _blocks(content: str | Sequence[object], *, at: str, kinds: Kinds) -> list[Parameters]:
    if isinstance(content, str):
        return [_Text(type="text", text=content)]
    return [_block(block, at=f"{at}.{number}", kinds=kinds) for number, block in enumerate(content)]


def _block(block: object, *, at: str, kinds: Kinds) -> Parameters:
    kind = block.get("type") if isinstance(block, dict) else None
    model = kinds.get(kind) if isinstance(kind, str) else None
    if isinstance(block, dict) and model is None:
        raise _block_refusal(kind, at=at, kinds=kinds)
    return validate(model or _Text, block, at=at, without_effect=_WITHOUT_EFFECT)


def _block_refusal(kind: object, *, at: str, kinds: Kinds) -> RequestRefused:
    known = {**_USER, **_ASSISTANT}
    if isinstance(kind, str) and kind in known:
        return wrong(f"{at}.type", f"{kind!r} is not allowed here: give {', '.join(kinds)}")
    return unsupported(f"{at}.type", f"{kind!r} is not one of {', '.join(known)}")


def _text(content: object, *, at: str) -> str:
    """The text of text blocks, joined by line breaks."""
    if not isinstance(content, str | list):
        raise wrong(at, "must be a text or a list of text blocks")
    blocks = _blocks(content, at=at, kinds=_SYSTEM)
    return "\n".join(block.text for block in blocks if isinstance(block, _Text))
