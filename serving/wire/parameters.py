"""Checks of a body: unknown parameters are refused by name, values without effect are accepted."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.config import SamplingDefaults

MIN_TEMPERATURE = 0.01
"""Below it vLLM samples at another temperature than the one it was given."""

WithoutEffect = Mapping[str, tuple[object, ...]]
"""Unsupported parameters, each with the values that change nothing; null never changes anything."""

_NOTHING: WithoutEffect = MappingProxyType({})

Tag = Annotated[str, Field(max_length=512)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Parameters(BaseModel):
    """Base of every model of a body, or of an object in one: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Parameters)


def validate(
    model: type[Model], value: object, *, at: str = "", without_effect: WithoutEffect = _NOTHING
) -> Model:
    """`value` as a `model`.

    Args:
        model: The fields that are supported.
        value: Parsed JSON.
        at: Where `value` stands in the body, e.g. `input.3`; empty for the body itself.
        without_effect: Parameters that are dropped before the check when their value changes
            nothing.

    Raises:
        RequestRefused: a parameter is wrong or not supported; the error names it.
    """
    if not isinstance(value, dict):
        where = at or "the body"
        raise RequestRefused(f"{where} must be a JSON object", 400, at or None, "invalid_value")
    effective = {
        name: given
        for name, given in value.items()
        if not (
            name in without_effect and (given is None or _is_one_of(given, without_effect[name]))
        )
    }
    try:
        return model.model_validate(effective)
    except ValidationError as error:
        raise refusal(error, at=at) from error


def unsupported(param: str, why: str) -> RequestRefused:
    """The refusal of a parameter or value that this gateway cannot honour."""
    return RequestRefused(f"{param} is not supported: {why}", 400, param, "unsupported_parameter")


def wrong(param: str, why: str) -> RequestRefused:
    """The refusal of a value that is wrong."""
    return RequestRefused(f"{param}: {why}", 400, param, "invalid_value")


def refusal(error: ValidationError, *, at: str = "") -> RequestRefused:
    """The refusal of the first fault that pydantic found, under the name of its parameter."""
    fault = error.errors(include_url=False, include_input=False)[0]
    param = ".".join([*([at] if at else []), *_names(fault["loc"])])
    if fault["type"] == "extra_forbidden":
        return RequestRefused(f"{param} is not supported", 400, param, "unsupported_parameter")
    return RequestRefused(f"{param}: {fault['msg']}", 400, param or None, "invalid_value")


def sampling(
    defaults: SamplingDefaults,
    *,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    top_k: int | None = None,
    stop: list[str] | None = None,
) -> Sampling:
    """Sampling parameters, with defaults for those that the body leaves out.

    Raises:
        RequestRefused: the engine would change the temperature.
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
    # In Python 0 == False and 1 == True; in JSON they differ.
    return any(type(given) is type(value) and given == value for value in values)


def _names(loc: tuple[Any, ...]) -> list[str]:
    """The place of a fault, without the type names that pydantic adds for members of a union."""
    names: list[str] = []
    for part in loc:
        if not isinstance(part, int) and (part == "str" or not part.isidentifier()):
            break
        names.append(str(part))
    return names
