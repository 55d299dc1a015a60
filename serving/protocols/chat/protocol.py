"""`/v1/chat/completions`: a body to a request, and the wire that puts both ways together.

What is not supported is refused by name. A value that asks for nothing (`tools: []`) is allowed.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from onlinerl.errors import EngineFailed, RequestRefused
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.ids import session_of
from onlinerl.serving.interaction.pieces import Outcome
from onlinerl.serving.interaction.request import Conversation, JsonFormat, Request
from onlinerl.serving.protocols.chat.input import read_messages, read_tool_choice, read_tools
from onlinerl.serving.protocols.chat.output import ChatWriter, completion_body
from onlinerl.serving.protocols.chat.sampling import SamplingBody, sampling_of
from onlinerl.serving.wire.errors import error_body
from onlinerl.serving.wire.parameters import Harmless, Parameters, Tag, checked, unsupported, wrong
from onlinerl.serving.wire.protocol import Asked, Body

_HARMLESS: Harmless = {
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


class _StreamOptions(Parameters):
    include_usage: bool | None = None


class _JsonObject(Parameters):
    type: Literal["json_object"]


class _Schema(Parameters):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """The engine enforces the schema in any case."""


class _JsonSchema(Parameters):
    type: Literal["json_schema"]
    json_schema: _Schema


class _TemplateOptions(Parameters):
    enable_thinking: bool | None = None


class ChatBody(SamplingBody):
    """A body whose plain values are checked; the rest is read by the functions of this file."""

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
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    """What took the place of `user` in this protocol."""
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    """A hint that is not needed: requests of a session meet at the replica that has its prefix."""
    metadata: dict[str, Tag] | None = Field(default=None, max_length=16)


def read_chat(body: object, *, config: GatewayConfig) -> Request:
    """A checked request.

    Raises:
        RequestRefused: naming the parameter that is wrong or not supported.
    """
    chat = checked(ChatBody, body, harmless=_HARMLESS)
    if chat.stream_options is not None and not chat.stream:
        raise wrong("stream_options", "needs stream")
    options = chat.stream_options or _StreamOptions()
    tools = read_tools(chat.tools or ())
    tags = chat.metadata or {}
    parallel = chat.parallel_tool_calls is not False
    return Request(
        protocol="openai.chat",
        model=chat.model,
        prompt=Conversation(
            messages=read_messages(chat.messages), tools=tools, thinking=_thinking(chat)
        ),
        sampling=sampling_of(chat, config=config, max_tokens=_max_tokens(chat)),
        num_choices=chat.num_choices(config.limits.max_choices),
        stream=bool(chat.stream),
        tool_choice=read_tool_choice(chat.tool_choice, tools=tools, parallel=parallel),
        format=_format(chat.response_format),
        top_logprobs=_top_logprobs(chat),
        user=chat.user if chat.user is not None else chat.safety_identifier,
        session_id=session_of(tags),
        tags=tags,
        include_usage=bool(options.include_usage),
    )


class ChatWire:
    """OpenAI's chat completions."""

    async def read(self, asked: Asked) -> Request:
        """A checked request."""
        return read_chat(asked.body, config=asked.config)

    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        """One `chat.completion`."""
        return completion_body(exchange, outcomes)

    def writer(self, exchange: Exchange) -> ChatWriter:
        """Chunks of a `chat.completion`."""
        return ChatWriter(exchange)

    async def ended(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        """Nothing is kept."""

    def error(self, error: RequestRefused | EngineFailed) -> Body:
        """OpenAI's envelope."""
        return error_body(error)


def _max_tokens(chat: ChatBody) -> int | None:
    given = {chat.max_tokens, chat.max_completion_tokens} - {None}
    if len(given) > 1:
        raise wrong("max_completion_tokens", "differs from max_tokens")
    return given.pop() if given else None


def _top_logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs and not chat.logprobs:
        raise wrong("top_logprobs", "needs logprobs")
    return (chat.top_logprobs or 0) if chat.logprobs else None


def _thinking(chat: ChatBody) -> bool | None:
    asked = None if chat.chat_template_kwargs is None else chat.chat_template_kwargs.enable_thinking
    if chat.reasoning_effort is None:
        return asked
    if chat.reasoning_effort != "none":
        raise unsupported(
            "reasoning_effort", "a model thinks or does not; leave it out, or give none"
        )
    if asked:
        raise wrong("reasoning_effort", "is none, and enable_thinking is true")
    return False


def _format(value: Any) -> JsonFormat | None:  # noqa: ANN401 any JSON
    if value is None:
        return None
    if isinstance(value, dict) and value.get("type") == "json_object":
        checked(_JsonObject, value, at="response_format")
        return JsonFormat()
    return JsonFormat(schema=checked(_JsonSchema, value, at="response_format").json_schema.schema_)
