"""Messages of `/v1/chat/completions` as messages of a `Conversation`."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from onlinerl.serving.interaction.request import Message, Role, ToolCall
from onlinerl.serving.wire.parameters import (
    Parameters,
    WithoutEffect,
    unsupported,
    validate,
    wrong,
)

_WITHOUT_EFFECT: WithoutEffect = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_calls": ([],),
}


class _TextPart(Parameters):
    type: Literal["text"]
    text: str


class _Function(Parameters):
    name: str = Field(min_length=1)
    arguments: str
    parsed_arguments: object = None
    """OpenAI's client adds it: `arguments`, parsed."""


class _Call(Parameters):
    id: str = Field(min_length=1, max_length=512)
    type: Literal["function"] = "function"
    function: _Function
    index: int | None = None
    """OpenAI's client adds it: the number of the call in a stream."""


class _PromptMessage(Parameters):
    role: Literal["system", "developer", "user"]
    content: str | list[_TextPart]


class _AssistantMessage(Parameters):
    role: Literal["assistant"]
    content: str | list[_TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    parsed: object = None
    """OpenAI's client adds it: `content`, parsed."""


class _ToolMessage(Parameters):
    role: Literal["tool"]
    content: str | list[_TextPart]
    tool_call_id: str = Field(min_length=1, max_length=512)
    name: str | None = None


_MODELS: Mapping[str, type[Parameters]] = {
    "system": _PromptMessage,
    "developer": _PromptMessage,
    "user": _PromptMessage,
    "assistant": _AssistantMessage,
    "tool": _ToolMessage,
}


def messages_of(values: Sequence[object]) -> tuple[Message, ...]:
    """The conversation.

    Raises:
        RequestRefused: a message is wrong or not supported; the error names it.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    for number, value in enumerate(values):
        message = _read(value, at=f"messages.{number}", names=names)
        names |= {call.id: call.name for call in message.tool_calls}
        messages.append(message)
    return tuple(messages)


def _read(value: object, *, at: str, names: Mapping[str, str]) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    model = _MODELS.get(role) if isinstance(role, str) else None
    if isinstance(value, dict):
        _refuse_media(value.get("content"), at=at)
        if model is None:
            raise wrong(f"{at}.role", f"is {role!r}: give one of {', '.join(_MODELS)}")
    body = validate(model or _PromptMessage, value, at=at, without_effect=_WITHOUT_EFFECT)
    if isinstance(body, _AssistantMessage):
        return _assistant_message(body)
    if isinstance(body, _ToolMessage):
        return _tool_message(body, at=at, names=names)
    assert isinstance(body, _PromptMessage)
    # `developer` is OpenAI's newer word for what chat templates call `system`.
    known: Role = "user" if body.role == "user" else "system"
    return Message(role=known, content=_text(body.content))


def _assistant_message(body: _AssistantMessage) -> Message:
    return Message(
        role="assistant",
        content=_text(body.content or ""),
        reasoning=body.reasoning_content or None,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in body.tool_calls or ()
        ),
    )


def _tool_message(body: _ToolMessage, *, at: str, names: Mapping[str, str]) -> Message:
    if body.tool_call_id not in names:
        raise wrong(f"{at}.tool_call_id", f"no earlier message has a call {body.tool_call_id!r}")
    name = names[body.tool_call_id]
    if body.name not in (None, name):
        raise wrong(f"{at}.name", f"is {body.name!r}, but {body.tool_call_id!r} calls {name!r}")
    return Message(
        role="tool",
        content=_text(body.content),
        tool_call_id=body.tool_call_id,
        name=name,
    )


def _refuse_media(content: object, *, at: str) -> None:
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(
                f"{at}.content.{number}.type", f"{kind!r}, but this model reads text only"
            )


def _text(content: str | list[_TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
