"""The model families that the package `renderers` knows."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args

_NO_FAMILIES = frozenset({"auto", "default", "custom"})


def family_names() -> Sequence[str]:
    """Names of the families that `renderers` knows, sorted."""
    return sorted(_config_classes())


def detect_family(source: str) -> str | None:
    """The family of a Hugging Face id; None if `renderers` does not list exactly this id."""
    from renderers.base import MODEL_RENDERER_MAP

    family: str | None = MODEL_RENDERER_MAP.get(source)
    return family


def family_config(family: str) -> Any:  # noqa: ANN401 a class of `renderers` for every family
    """The family's configuration; it keeps reasoning in a history that is extended."""
    return _config_classes()[family](thinking_retention="all")


@cache
def _config_classes() -> Mapping[str, Any]:
    """The configuration class of every family by its name."""
    from renderers.configs import RendererConfig

    union, *_ = get_args(RendererConfig)
    classes = {config.model_fields["name"].default: config for config in get_args(union)}
    return {name: config for name, config in classes.items() if name not in _NO_FAMILIES}
