"""The body of `/v1/responses`, beside its input items."""

from typing import Any, Literal

from pydantic import Field

from onlinerl.serving.interaction.request import JsonFormat, Tool, ToolChoice
from onlinerl.serving.wire.parameters import (
    Parameters,
    Tag,
    WithoutEffect,
    unsupported,
    validate,
    wrong,
)
from onlinerl.serving.wire.tools import ToolName, read_tools

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"

_WITHOUT_EFFECT: WithoutEffect = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": ([],),
    "input": (),
    "max_tool_calls": (),
    "metadata": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "24h"),
    "reasoning": (),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "text": (),
    "tool_choice": (),
    "tools": (),
    "truncation": ("disabled",),
}

_TOOL_WITHOUT_EFFECT: WithoutEffect = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}


class ReasoningParameters(Parameters):
    """`reasoning`: whether the model reasons, and what the answer shows of it."""

    effort: Literal["none"] | None = None
    """Other efforts are refused: a model reasons or does not."""
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class _Format(Parameters):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class _Text(Parameters):
    format: _Format | None = None
    verbosity: Literal["medium"] | None = None


class _Function(Parameters):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _NamedFunction(Parameters):
    type: Literal["function"]
    name: str


class ResponsesBody(Parameters):
    """The body with its plain values checked.

    `tools_of`, `tool_choice_of` and `messages_of` read the rest.
    """

    model: str
    input: str | list[Any] = Field(default_factory=list, max_length=10_000_000)
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Any] = Field(default_factory=list, max_length=1024)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: ReasoningParameters | None = None
    include: list[str] = Field(default_factory=list, max_length=16)
    metadata: dict[str, Tag] = Field(default_factory=dict, max_length=16)
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = Field(default=None, max_length=512)

    @property
    def thinking(self) -> bool | None:
        """Whether a model that can reason should; None leaves it to the chat template."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return None if effort is None else False

    @property
    def num_alternatives(self) -> int | None:
        """Alternatives to show per token; None shows no log-probabilities."""
        wants_logprobs = LOGPROBS in self.include or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if wants_logprobs else None

    @property
    def json_format(self) -> JsonFormat | None:
        """The JSON that the answer must be; None for any text."""
        text_format = None if self.text is None else self.text.format
        if text_format is None or text_format.type == "text":
            return None
        return JsonFormat(schema=text_format.json_schema)


def read_body(value: object) -> ResponsesBody:
    """A checked body.

    Raises:
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    body = validate(ResponsesBody, value, without_effect=_WITHOUT_EFFECT)
    for number, name in enumerate(body.include):
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise unsupported(
                f"include.{number}",
                f"{name!r} is unknown: give {LOGPROBS} or {ENCRYPTED_REASONING}",
            )
    _check_schema(body.text)
    return body


def tools_of(body: ResponsesBody) -> tuple[Tool, ...]:
    """The functions that the model may call.

    Raises:
        RequestRefused: a tool is no function, or two have the same name.
    """
    return read_tools(body.tools, _read_tool)


def tool_choice_of(body: ResponsesBody, tools: tuple[Tool, ...]) -> ToolChoice:
    """Whether the functions may, must or must not be called.

    Raises:
        RequestRefused: the choice does not fit `tools`.
    """
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        mode = _mode(choice)
        if mode == "required" and not tools:
            raise wrong("tool_choice", "required needs tools")
        return ToolChoice(mode=mode, parallel=parallel)
    if isinstance(choice, dict) and choice.get("type") not in (None, "function"):
        raise unsupported("tool_choice", f"give auto, none, required or a function, not {choice}")
    name = validate(_NamedFunction, choice, at="tool_choice").name
    if name not in {tool.name for tool in tools}:
        raise wrong("tool_choice.name", f"there is no function {name!r} in tools")
    return ToolChoice(mode="required", name=name, parallel=parallel)


def _mode(choice: str | None) -> Literal["auto", "none", "required"]:
    modes: dict[str, Literal["auto", "none", "required"]] = {
        "auto": "auto",
        "none": "none",
        "required": "required",
    }
    if choice is not None and choice not in modes:
        raise wrong("tool_choice", f"give auto, none, required or a function, not {choice!r}")
    return modes[choice or "auto"]


def _read_tool(value: object, *, at: str) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(
            f"{at}.type", f"{kind!r} would be run by a server; give tools of the type function"
        )
    tool = validate(_Function, value, at=at, without_effect=_TOOL_WITHOUT_EFFECT)
    return Tool(
        name=tool.name,
        description=tool.description or "",
        parameters=tool.parameters or {},
        strict=bool(tool.strict),
    )


def _check_schema(text: _Text | None) -> None:
    text_format = None if text is None else text.format
    if text_format is None:
        return
    has_schema = text_format.json_schema is not None
    if has_schema and text_format.type != "json_schema":
        raise wrong(
            "text.format.schema", f"goes with the type json_schema, not {text_format.type!r}"
        )
    if text_format.type == "json_schema" and not has_schema:
        raise wrong("text.format.schema", "is missing")
