"""`/v1/chat/completions`, the way in: messages, tools and what may be called."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from onlinerl.serving.interaction.request import Message, Role, Tool, ToolCall, ToolChoice
from onlinerl.serving.wire.parameters import Harmless, Parameters, checked, unsupported, wrong

_HARMLESS: Harmless = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_calls": ([],),
}
_NOT_TEXT = "this model reads text only"

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _TextPart(Parameters):
    type: Literal["text"]
    text: str


class _Function(Parameters):
    name: str = Field(min_length=1)
    arguments: str
    parsed_arguments: object = None
    """What OpenAI's client made of `arguments`."""


class _Call(Parameters):
    id: str = Field(min_length=1, max_length=512)
    type: Literal["function"] = "function"
    function: _Function
    index: int | None = None
    """Where it was in a stream."""


class _Asked(Parameters):
    role: Literal["system", "developer", "user"]
    content: str | list[_TextPart]


class _Answered(Parameters):
    role: Literal["assistant"]
    content: str | list[_TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    parsed: object = None
    """What OpenAI's client made of `content`."""


class _Returned(Parameters):
    role: Literal["tool"]
    content: str | list[_TextPart]
    tool_call_id: str = Field(min_length=1, max_length=512)
    name: str | None = None


class _FunctionTool(Parameters):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Parameters):
    type: Literal["function"]
    function: _FunctionTool


class _Named(Parameters):
    name: Name


class _NamedChoice(Parameters):
    type: Literal["function"]
    function: _Named


_MODELS: Mapping[str, type[Parameters]] = {
    "system": _Asked,
    "developer": _Asked,
    "user": _Asked,
    "assistant": _Answered,
    "tool": _Returned,
}


def read_messages(values: Sequence[object]) -> tuple[Message, ...]:
    """The conversation.

    Raises:
        RequestRefused: naming the message and what is wrong with it.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    for number, value in enumerate(values):
        message = _read(value, at=f"messages.{number}", names=names)
        names |= {call.id: call.name for call in message.tool_calls}
        messages.append(message)
    return tuple(messages)


def read_tools(values: Sequence[object]) -> tuple[Tool, ...]:
    """The functions that may be called.

    Raises:
        RequestRefused: for a tool that is no function, or two of one name.
    """
    tools = tuple(_tool(value, at=f"tools.{number}") for number, value in enumerate(values))
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise wrong(f"tools.{number}.function.name", f"{name!r} is there twice")
    return tools


def read_tool_choice(value: object, *, tools: Sequence[Tool], parallel: bool) -> ToolChoice:
    """Whether tools may, must or must not be called.

    Raises:
        RequestRefused: for a choice that `tools` do not allow.
    """
    if value is None or value == "auto":
        return ToolChoice(parallel=parallel)
    if value == "none":
        return ToolChoice(mode="none", parallel=parallel)
    if value == "required":
        if not tools:
            raise wrong("tool_choice", "is 'required' without tools: give tools")
        return ToolChoice(mode="required", parallel=parallel)
    if isinstance(value, str):
        raise wrong("tool_choice", f"is {value!r}: give auto, none, required or a function")
    if isinstance(value, dict) and value.get("type") != "function":
        raise unsupported("tool_choice", "give auto, none, required or a function")
    name = checked(_NamedChoice, value, at="tool_choice").function.name
    if name not in [tool.name for tool in tools]:
        raise wrong("tool_choice", f"names {name!r}, which is not among the tools")
    return ToolChoice(mode="required", name=name, parallel=parallel)


def _read(value: object, *, at: str, names: Mapping[str, str]) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    model = _MODELS.get(role) if isinstance(role, str) else None
    if isinstance(value, dict):
        _refuse_media(value.get("content"), at=at)
        if model is None:
            raise wrong(f"{at}.role", f"is {role!r}: give one of {', '.join(_MODELS)}")
    body = checked(model or _Asked, value, at=at, harmless=_HARMLESS)
    if isinstance(body, _Answered):
        return _answered(body)
    if isinstance(body, _Returned):
        return _returned(body, at=at, names=names)
    assert isinstance(body, _Asked)
    # `developer` is OpenAI's newer word for what chat templates call `system`.
    known: Role = "user" if body.role == "user" else "system"
    return Message(role=known, content=_text(body.content))


def _answered(body: _Answered) -> Message:
    return Message(
        role="assistant",
        content=_text(body.content or ""),
        reasoning=body.reasoning_content or None,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in body.tool_calls or ()
        ),
    )


def _returned(body: _Returned, *, at: str, names: Mapping[str, str]) -> Message:
    if body.tool_call_id not in names:
        raise wrong(f"{at}.tool_call_id", f"{body.tool_call_id!r} is no call of an earlier message")
    name = names[body.tool_call_id]
    if body.name not in (None, name):
        raise wrong(f"{at}.name", f"is {body.name!r}, and {body.tool_call_id!r} calls {name!r}")
    return Message(
        role="tool",
        content=_text(body.content),
        tool_call_id=body.tool_call_id,
        name=name,
    )


def _tool(value: object, *, at: str) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"{at}.type", f"{kind!r} is no function, and only functions are called")
    function = checked(_Tool, value, at=at).function
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {},
        strict=bool(function.strict),
    )


def _refuse_media(content: object, *, at: str) -> None:
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(f"{at}.content.{number}.type", f"{kind!r}, and {_NOT_TEXT}")


def _text(content: str | list[_TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
