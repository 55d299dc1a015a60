"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, beside their messages."""

from typing import Any, Literal

from pydantic import Field

from onlinerl.serving.interaction.request import JsonFormat, Tool, ToolChoice
from onlinerl.serving.wire.parameters import (
    Parameters,
    StopString,
    WithoutEffect,
    unsupported,
    validate,
    wrong,
)
from onlinerl.serving.wire.tools import ToolName, read_tools

CACHE_CONTROL: WithoutEffect = {
    "cache_control": (
        {"type": "ephemeral"},
        {"type": "ephemeral", "ttl": "5m"},
        {"type": "ephemeral", "ttl": "1h"},
    )
}
"""The engine always caches prefixes, so asking for it changes nothing."""

_WITHOUT_EFFECT: WithoutEffect = {
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

_TOOL_WITHOUT_EFFECT: WithoutEffect = {
    **CACHE_CONTROL,
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    # The input of a call is always sent whole: only then is it known to be valid.
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
    """A body of `count_tokens`: the parameters that shape a prompt."""

    model: str
    messages: list[Any] = Field(min_length=1, max_length=10_000)
    system: str | list[Any] | None = None
    tools: list[Any] = Field(default_factory=list, max_length=1024)
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _Output | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether a model that can reason should; None leaves it to the chat template."""
        if self.thinking is None or self.thinking.type == "adaptive":
            return None
        return self.thinking.type == "enabled"

    @property
    def json_format(self) -> JsonFormat | None:
        """The JSON that the answer must be; None for any text."""
        schema_format = None if self.output_config is None else self.output_config.format
        return None if schema_format is None else JsonFormat(schema=schema_format.json_schema)


class MessagesBody(CountBody):
    """A body of `/v1/messages` with its plain values checked.

    `tools_of`, `tool_choice_of` and `messages_of` read the rest.
    """

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
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    body = validate(MessagesBody, value, without_effect=_WITHOUT_EFFECT)
    _check_budget(body)
    return body


def read_count_body(value: object) -> CountBody:
    """A checked body of `count_tokens`.

    Raises:
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    return validate(CountBody, value, without_effect=_WITHOUT_EFFECT)


def tools_of(body: CountBody) -> tuple[Tool, ...]:
    """The functions that the model may call.

    Raises:
        RequestRefused: a tool is one of Anthropic's own, or two have the same name.
    """
    return read_tools(body.tools, _read_tool)


def tool_choice_of(body: CountBody, tools: tuple[Tool, ...]) -> ToolChoice:
    """Whether the functions may, must or must not be called.

    Raises:
        RequestRefused: the choice does not fit `tools`, or contradicts itself.
    """
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    if (choice.name is not None) != (choice.type == "tool"):
        raise wrong("tool_choice.name", "is required for the type tool and allowed only with it")
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


def _read_tool(value: object, *, at: str) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        raise unsupported(
            f"{at}.type", f"{kind!r} is one of Anthropic's own tools; give tools of the type custom"
        )
    tool = validate(_ToolBody, value, at=at, without_effect=_TOOL_WITHOUT_EFFECT)
    return Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=tool.input_schema,
        strict=bool(tool.strict),
    )


def _check_budget(body: MessagesBody) -> None:
    """Anthropic refuses such budgets too. Here `max_tokens` alone bounds the reasoning."""
    budget = None if body.thinking is None else body.thinking.budget_tokens
    if budget is not None and budget >= body.max_tokens:
        raise wrong(
            "thinking.budget_tokens",
            f"{budget} is not less than max_tokens, which is {body.max_tokens}",
        )
