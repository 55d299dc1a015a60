"""Checking a body: what is not known is refused by name, what asks for nothing is let through."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.config import SamplingDefaults
from onlinerl.serving.interaction.request import Tool

MIN_TEMPERATURE = 0.01
"""Below it vLLM samples at another temperature than it was told."""

Harmless = Mapping[str, tuple[object, ...]]
"""Parameters that are not supported, with the values that change nothing; null never does."""

NONE: Harmless = MappingProxyType({})

Tag = Annotated[str, Field(max_length=512)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Parameters(BaseModel):
    """Base of what a body, or an object in it, may hold."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Parameters)


def checked(model: type[Model], value: object, *, at: str = "", harmless: Harmless = NONE) -> Model:
    """`value` as a `model`.

    Args:
        model: what it may hold.
        value: as it came, parsed JSON.
        at: where it stands in the body, e.g. `input.3`; empty for the body itself.
        harmless: what is dropped before the check, because it asks for nothing.

    Raises:
        RequestRefused: naming the parameter that is wrong or not supported.
    """
    if not isinstance(value, dict):
        where = at or "the body"
        raise RequestRefused(f"{where} must be a JSON object", 400, at or None, "invalid_value")
    plain = {
        name: given
        for name, given in value.items()
        if not (name in harmless and (given is None or _is_one_of(given, harmless[name])))
    }
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise refusal(error, at=at) from error


def unsupported(param: str, why: str) -> RequestRefused:
    """The refusal of something that this gateway cannot do."""
    return RequestRefused(f"{param} is not supported: {why}", 400, param, "unsupported_parameter")


def wrong(param: str, why: str) -> RequestRefused:
    """The refusal of a value."""
    return RequestRefused(f"{param}: {why}", 400, param, "invalid_value")


def refuse_equal_names(tools: Sequence[Tool]) -> None:
    """Nothing, when every tool has a name of its own.

    Raises:
        RequestRefused: naming the first that has not.
    """
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise wrong(f"tools.{number}.name", f"{name!r} is there twice")


def sampling(
    defaults: SamplingDefaults,
    *,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    top_k: int | None = None,
    stop: list[str] | None = None,
) -> Sampling:
    """Sampling parameters, with defaults where the caller says nothing.

    Raises:
        RequestRefused: for a temperature that the engine would not keep.
    """
    if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
        raise wrong("temperature", f"{temperature} is too low, give 0 or at least 0.01")
    return Sampling(
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k or 0,
        max_tokens=defaults.max_tokens if max_tokens is None else max_tokens,
        stop=stop or [],
    )


def _is_one_of(given: object, values: tuple[object, ...]) -> bool:
    # Python takes 0 and False, 1 and True for the same; JSON does not.
    return any(type(given) is type(value) and given == value for value in values)


def refusal(error: ValidationError, *, at: str = "") -> RequestRefused:
    """The first fault of a body, under the name of its parameter."""
    fault = error.errors(include_url=False, include_input=False)[0]
    param = ".".join([*([at] if at else []), *_names(fault["loc"])])
    if fault["type"] == "extra_forbidden":
        return RequestRefused(f"{param} is not supported", 400, param, "unsupported_parameter")
    return RequestRefused(f"{param}: {fault['msg']}", 400, param or None, "invalid_value")


def _names(loc: tuple[Any, ...]) -> list[str]:
    """The place of a fault; members of a union add their type's name, which callers do not know."""
    names: list[str] = []
    for part in loc:
        if not isinstance(part, int) and (part == "str" or not part.isidentifier()):
            break
        names.append(str(part))
    return names
