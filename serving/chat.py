"""`/v1/chat/completions`, the way in: a body to what is sampled.

What is not supported is refused by name. A value that asks for nothing (`tools: []`) is allowed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.config import SamplingDefaults
from onlinerl.serving.renderer import Message

_MIN_TEMPERATURE = 0.01
"""Below it vLLM samples at another temperature than it was told."""

_ASKS_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Parameters that are not supported, with the values that change nothing."""

_MESSAGE_ASKS_FOR_NOTHING: dict[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}


class _TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class _MessageBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_TextPart]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None


_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Stops = Annotated[list[_Stop], Field(max_length=16)]
_Tag = Annotated[str, Field(max_length=512)]


class _ChatBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    messages: list[_MessageBody] = Field(min_length=1, max_length=10_000)
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: _Stop | _Stops | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    metadata: dict[str, _Tag] | None = Field(default=None, max_length=16)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """What a caller asks for, with defaults filled in."""

    model: str
    messages: tuple[Message, ...]
    num_choices: int
    sampling: Sampling
    """`max_tokens` is None where neither caller nor configuration bounds it."""
    stream: bool
    include_usage: bool
    user: str | None
    tags: dict[str, str]


def parse_chat(body: object, *, defaults: SamplingDefaults, max_choices: int) -> ChatRequest:
    """A checked request.

    Raises:
        RequestRefused: naming the parameter that is wrong or not supported.
    """
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    try:
        chat = _ChatBody.model_validate(_plain(body))
    except ValidationError as error:
        raise refusal(error) from error
    if (chat.n or 1) > max_choices:
        raise RequestRefused(f"n is {chat.n}: at most {max_choices} choices", 400, "n")
    if chat.stream_options is not None and not chat.stream:
        raise RequestRefused("stream_options needs stream", 400, "stream_options")
    options = chat.stream_options or _StreamOptions()
    return ChatRequest(
        model=chat.model,
        messages=tuple(_message(message) for message in chat.messages),
        num_choices=chat.n or 1,
        sampling=_sampling(chat, defaults=defaults),
        stream=bool(chat.stream),
        include_usage=bool(options.include_usage),
        user=chat.user,
        tags=chat.metadata or {},
    )


def refusal(error: ValidationError) -> RequestRefused:
    """The first fault of a body, under the name of its parameter."""
    fault = error.errors(include_url=False, include_input=False)[0]
    # Members of a union add their type's name to the place; callers do not know those.
    named = takewhile(_is_name, fault["loc"])
    param = ".".join(str(part) for part in named) or None
    if fault["type"] == "extra_forbidden":
        return RequestRefused(f"{param} is not supported", 400, param, "unsupported_parameter")
    return RequestRefused(f"{param}: {fault['msg']}", 400, param, "invalid_value")


def _is_name(part: int | str) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part != "str")


def _plain(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without parameters that ask for nothing."""
    plain = _without_empty(body, _ASKS_FOR_NOTHING)
    messages = plain.get("messages")
    if isinstance(messages, list):
        plain["messages"] = [
            _without_empty(message, _MESSAGE_ASKS_FOR_NOTHING)
            if isinstance(message, dict)
            else message
            for message in messages
        ]
    return plain


def _without_empty(
    values: Mapping[str, Any], empty: Mapping[str, tuple[object, ...]]
) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if not (name in empty and (value is None or value in empty[name]))
    }


def _message(message: _MessageBody) -> Message:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    # `developer` is OpenAI's newer word for what chat templates call `system`.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text}


def _sampling(chat: _ChatBody, *, defaults: SamplingDefaults) -> Sampling:
    temperature = defaults.temperature if chat.temperature is None else chat.temperature
    if 0 < temperature < _MIN_TEMPERATURE:
        raise RequestRefused(
            f"temperature is {temperature}: give 0 or at least {_MIN_TEMPERATURE}",
            400,
            "temperature",
        )
    stop = [chat.stop] if isinstance(chat.stop, str) else (chat.stop or [])
    return Sampling(
        temperature=temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        top_k=max(chat.top_k or 0, 0),
        max_tokens=_max_tokens(chat, default=defaults.max_tokens),
        seed=chat.seed,
        stop=stop,
    )


def _max_tokens(chat: _ChatBody, *, default: int | None) -> int | None:
    given = {chat.max_tokens, chat.max_completion_tokens} - {None}
    if len(given) > 1:
        raise RequestRefused(
            "max_tokens and max_completion_tokens differ", 400, "max_completion_tokens"
        )
    return given.pop() if given else default
