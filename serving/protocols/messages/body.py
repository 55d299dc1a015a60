"""Anthropic's `/v1/messages`, the way in: what a body may say beside its messages.

What is not supported is refused by name. Content blocks are in `messages_blocks`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from onlinerl.serving.interaction.request import JsonFormat, Tool, ToolChoice
from onlinerl.serving.wire.parameters import (
    Parameters,
    StopString,
    ToolName,
    checked,
    refuse_equal_names,
    unsupported,
    wrong,
)

CACHE_CONTROL: Mapping[str, tuple[object, ...]] = {
    "cache_control": (
        {"type": "ephemeral"},
        {"type": "ephemeral", "ttl": "5m"},
        {"type": "ephemeral", "ttl": "1h"},
    )
}
"""Prefixes are always cached, so a mark that asks for it changes nothing."""

_ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    **CACHE_CONTROL,
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": ("global",),
    "mcp_servers": ([],),
    "metadata": (),
    "output_config": ({},),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "stop_sequences": (),
    "system": (),
    "thinking": (),
    "tool_choice": (),
    "tools": (),
}

_TOOL_ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    **CACHE_CONTROL,
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    # Input is sent when it is whole, which is as early as it is known to be valid.
    "eager_input_streaming": (True, False),
    "type": (),
}


class _Metadata(Parameters):
    user_id: str | None = Field(default=None, max_length=512)


class _Thinking(Parameters):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)


class _Format(Parameters):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class _Output(Parameters):
    format: _Format | None = None


class _ToolBody(Parameters):
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class _Choice(Parameters):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(Parameters):
    """What shapes a prompt: all that `count_tokens` takes."""

    model: str
    messages: list[Any] = Field(min_length=1, max_length=10_000)
    system: str | list[Any] | None = None
    tools: list[Any] = Field(default_factory=list, max_length=1024)
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether a model that can reason should; None leaves it to its template."""
        if self.thinking is None or self.thinking.type == "adaptive":
            return None
        return self.thinking.type == "enabled"

    @property
    def json_format(self) -> JsonFormat | None:
        """The JSON that the answer must be."""
        given = None if self.output_config is None else self.output_config.format
        return None if given is None else JsonFormat(schema=given.json_schema)


class MessagesBody(CountBody):
    """A body whose plain values are checked; the rest is read by the functions of this file."""

    max_tokens: int = Field(ge=1)
    metadata: _Metadata | None = None
    stop_sequences: list[StopString] = Field(default_factory=list, max_length=16)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)


def read_body(value: object) -> MessagesBody:
    """A checked body.

    Raises:
        RequestRefused: naming the parameter that is wrong or not supported.
    """
    body = checked(MessagesBody, value, harmless=_ASKS_FOR_NOTHING)
    _check_budget(body)
    return body


def read_count(value: object) -> CountBody:
    """A checked body of `count_tokens`.

    Raises:
        RequestRefused: naming the parameter that is wrong or not supported.
    """
    return checked(CountBody, value, harmless=_ASKS_FOR_NOTHING)


def tools_of(body: CountBody) -> tuple[Tool, ...]:
    """The functions that the model may call.

    Raises:
        RequestRefused: for tools that the server would have to know or to run.
    """
    tools = tuple(_tool(value, at=f"tools.{number}") for number, value in enumerate(body.tools))
    refuse_equal_names(tools)
    return tools


def tool_choice_of(body: CountBody, tools: tuple[Tool, ...]) -> ToolChoice:
    """Whether the functions may, must or must not be called.

    Raises:
        RequestRefused: for a function that is not among `tools`, or a choice without a meaning.
    """
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    if (choice.name is not None) != (choice.type == "tool"):
        raise wrong("tool_choice.name", "goes with the type tool, and only with it")
    if choice.name is not None and choice.name not in {tool.name for tool in tools}:
        raise wrong("tool_choice.name", f"there is no tool {choice.name!r} in tools")
    if choice.type == "any" and not tools:
        raise wrong("tool_choice", "any needs tools")
    modes: dict[str, Literal["auto", "none", "required"]] = {
        "auto": "auto",
        "none": "none",
        "any": "required",
        "tool": "required",
    }
    return ToolChoice(mode=modes[choice.type], name=choice.name, parallel=parallel)


def _tool(value: object, *, at: str) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        raise unsupported(f"{at}.type", f"{kind!r} is a tool of Anthropic's; only own ones are")
    tool = checked(_ToolBody, value, at=at, harmless=_TOOL_ASKS_FOR_NOTHING)
    return Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=tool.input_schema,
        strict=bool(tool.strict),
    )


def _check_budget(body: MessagesBody) -> None:
    """A budget is a target in this protocol; here `max_tokens` alone bounds thinking."""
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget >= body.max_tokens:
        raise wrong(
            "thinking.budget_tokens",
            f"{budget} is not less than max_tokens, which is {body.max_tokens}",
        )
