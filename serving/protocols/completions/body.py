"""The body of `/v1/completions`, and its prompt."""

from typing import Any

from pydantic import Field

from onlinerl.serving.interaction.request import RawPrompt
from onlinerl.serving.wire.openai import CompletionParameters
from onlinerl.serving.wire.parameters import WithoutEffect, unsupported, validate, wrong

_WITHOUT_EFFECT: WithoutEffect = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "suffix": ("",),
}
_INT32 = 2**31


class CompletionBody(CompletionParameters):
    """The body with its plain values checked; `prompt_of` reads the prompt."""

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=20)
    user: str | None = Field(default=None, max_length=512)


def read_body(value: object) -> CompletionBody:
    """A checked body.

    Raises:
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    return validate(CompletionBody, value, without_effect=_WITHOUT_EFFECT)


def prompt_of(value: Any) -> RawPrompt:  # noqa: ANN401 any JSON
    """The one prompt of a body: a text, a list of token ids, or a list with one of these.

    Raises:
        RequestRefused: there is no prompt, there are several, or it has another type.
    """
    if isinstance(value, str):
        return RawPrompt(text=value)
    if isinstance(value, list) and value:
        if all(_is_token_id(item) for item in value):
            return RawPrompt(token_ids=tuple(value))
        if all(isinstance(item, str | list) for item in value):
            if len(value) > 1:
                raise unsupported("prompt", f"{len(value)} prompts; send one per request")
            return prompt_of(value[0])
    raise wrong("prompt", "give a text, or a list of token ids")


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < _INT32
