"""The body of `/v1/chat/completions`, beside its messages."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from onlinerl.serving.interaction.request import JsonFormat, Tool, ToolChoice
from onlinerl.serving.wire.openai import CompletionParameters
from onlinerl.serving.wire.parameters import (
    Parameters,
    Tag,
    WithoutEffect,
    unsupported,
    validate,
    wrong,
)
from onlinerl.serving.wire.tools import read_tools

_WITHOUT_EFFECT: WithoutEffect = {
    "audio": (),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_retention": ("in_memory", "24h"),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _JsonObject(Parameters):
    type: Literal["json_object"]


class _Schema(Parameters):
    name: _Name
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """The engine enforces the schema in any case."""


class _JsonSchema(Parameters):
    type: Literal["json_schema"]
    json_schema: _Schema


class _TemplateOptions(Parameters):
    enable_thinking: bool | None = None


class _Function(Parameters):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _FunctionTool(Parameters):
    type: Literal["function"]
    function: _Function


class _FunctionName(Parameters):
    name: _Name


class _NamedChoice(Parameters):
    type: Literal["function"]
    function: _FunctionName


class ChatBody(CompletionParameters):
    """The body with its plain values checked; messages, tools and format have readers of their own.

    Use the properties and the functions of this module to read it.
    """

    messages: list[Any] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Any] | None = Field(default=None, max_length=1024)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: _TemplateOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    """OpenAI's newer name for `user`."""
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    """Not needed: requests of a session go to the replica that has its prefix."""
    metadata: dict[str, Tag] | None = Field(default=None, max_length=16)


def read_body(value: object) -> ChatBody:
    """A checked body.

    Raises:
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    return validate(ChatBody, value, without_effect=_WITHOUT_EFFECT)


def max_tokens_of(body: ChatBody) -> int | None:
    """The bound on the answer in tokens, under its new or its old name; None when there is none.

    Raises:
        RequestRefused: both names are given and differ.
    """
    bounds = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(bounds) > 1:
        raise wrong("max_completion_tokens", "differs from max_tokens")
    return bounds.pop() if bounds else None


def top_logprobs_of(body: ChatBody) -> int | None:
    """Alternatives to show per token; None shows no log-probabilities.

    Raises:
        RequestRefused: `top_logprobs` is given without `logprobs`.
    """
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", "needs logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def thinking_of(body: ChatBody) -> bool | None:
    """Whether a model that can reason should; None leaves it to the chat template.

    Raises:
        RequestRefused: the effort is not `none`, or contradicts `enable_thinking`.
    """
    options = body.chat_template_kwargs
    enabled = None if options is None else options.enable_thinking
    if body.reasoning_effort is None:
        return enabled
    if body.reasoning_effort != "none":
        raise unsupported(
            "reasoning_effort", "a model reasons or does not; leave it out, or give none"
        )
    if enabled:
        raise wrong("reasoning_effort", "is none, but enable_thinking is true")
    return False


def json_format_of(body: ChatBody) -> JsonFormat | None:
    """The JSON that the answer must be; None for any text.

    Raises:
        RequestRefused: `response_format` is no format that the gateway knows.
    """
    value = body.response_format
    if value is None:
        return None
    if isinstance(value, dict) and value.get("type") == "json_object":
        validate(_JsonObject, value, at="response_format")
        return JsonFormat()
    return JsonFormat(schema=validate(_JsonSchema, value, at="response_format").json_schema.schema_)


def tools_of(body: ChatBody) -> tuple[Tool, ...]:
    """The functions that the model may call.

    Raises:
        RequestRefused: a tool is no function, or two have the same name.
    """
    return read_tools(body.tools or (), _read_tool, name_at="function.name")


def tool_choice_of(body: ChatBody, tools: Sequence[Tool]) -> ToolChoice:
    """Whether the functions may, must or must not be called.

    Raises:
        RequestRefused: the choice does not fit `tools`.
    """
    value = body.tool_choice
    parallel = body.parallel_tool_calls is not False
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
    name = validate(_NamedChoice, value, at="tool_choice").function.name
    if name not in [tool.name for tool in tools]:
        raise wrong("tool_choice", f"names {name!r}, which is not among the tools")
    return ToolChoice(mode="required", name=name, parallel=parallel)


def _read_tool(value: object, *, at: str) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"{at}.type", f"{kind!r} is no function; models here call functions only")
    function = validate(_FunctionTool, value, at=at).function
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {},
        strict=bool(function.strict),
    )
