"""Typed decoders of events, derived from the event models of the schema.

They accept less than the models do (no coercion, one form of a timestamp). For what they accept,
they give the same values. A record that they refuse is read by the models, which can say what is
wrong with it. Packed token arrays stay bytes: no list of numbers is made.
"""

import functools
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types as bounds
import msgspec
from pydantic import AwareDatetime, BaseModel, PlainSerializer
from pydantic.fields import FieldInfo

_INT64 = {"ge": -(2**63), "le": 2**63 - 1}
_UTC = r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z\Z"
"""The form of a timestamp that the models write; the models read all other forms."""

_LIMITS: dict[type, str] = {
    bounds.Ge: "ge",
    bounds.Gt: "gt",
    bounds.Le: "le",
    bounds.MinLen: "min_length",
    bounds.MaxLen: "max_length",
}
"""Constraints of pydantic by the name that they have in both libraries."""

_Metadata = tuple[Any, ...]
"""Constraints of a field, as `FieldInfo.metadata` has them."""


@functools.cache
def struct_of(model: type[BaseModel], *, keep_unknown: bool = False) -> type[msgspec.Struct]:
    """The struct with the fields of an event model.

    Args:
        model: An event, or a part of one.
        keep_unknown: True ignores fields that the model does not declare. False makes them an
            error, so that they are not lost unnoticed.

    Raises:
        TypeError: An annotation of the model has no counterpart in msgspec.
    """
    fields = [
        _field(name, info, keep_unknown=keep_unknown) for name, info in model.model_fields.items()
    ]
    return msgspec.defstruct(
        model.__name__,
        fields,
        kw_only=True,
        gc=False,
        forbid_unknown_fields=not keep_unknown,
    )


@functools.cache
def decoder_of(
    model: type[BaseModel], *, keep_unknown: bool = False
) -> "msgspec.json.Decoder[Any]":
    """A JSON decoder of an event model; it is safe to share."""
    return msgspec.json.Decoder(struct_of(model, keep_unknown=keep_unknown))


def _field(
    name: str, info: FieldInfo, *, keep_unknown: bool
) -> tuple[str, Any] | tuple[str, Any, Any]:
    kind = _type(info.annotation, tuple(info.metadata), keep_unknown=keep_unknown)
    if info.is_required():
        return name, kind
    return name, kind, info.get_default(call_default_factory=True)


def _type(annotation: Any, metadata: _Metadata, *, keep_unknown: bool) -> Any:  # noqa: ANN401
    """The type that msgspec decodes a field of a model as."""
    if any(isinstance(item, PlainSerializer) for item in metadata):
        return bytes
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return struct_of(annotation, keep_unknown=keep_unknown)
    generic = _GENERICS.get(get_origin(annotation))
    if generic is not None:
        return generic(annotation, metadata, keep_unknown)
    scalar = _SCALARS.get(annotation)
    if scalar is not None:
        return scalar(metadata)
    raise TypeError(f"no decoder for {annotation!r}")


def _optional(annotation: Any, metadata: _Metadata, keep_unknown: bool) -> Any:  # noqa: ANN401
    (inner,) = (item for item in get_args(annotation) if item is not types.NoneType)
    return _type(inner, metadata, keep_unknown=keep_unknown) | None


def _annotated(annotation: Any, metadata: _Metadata, keep_unknown: bool) -> Any:  # noqa: ANN401
    inner, *own = get_args(annotation)
    return _type(inner, (*own, *metadata), keep_unknown=keep_unknown)


def _list(annotation: Any, metadata: _Metadata, keep_unknown: bool) -> Any:  # noqa: ANN401
    (inner,) = get_args(annotation)
    item = _type(inner, (), keep_unknown=keep_unknown)
    return Annotated[list[item], _meta(metadata)]  # type: ignore[valid-type]


def _literal(annotation: Any, metadata: _Metadata, keep_unknown: bool) -> Any:  # noqa: ANN401
    return annotation


_GENERICS: dict[Any, Callable[[Any, _Metadata, bool], Any]] = {
    typing.Union: _optional,
    types.UnionType: _optional,
    Annotated: _annotated,
    list: _list,
    Literal: _literal,
}
"""By the origin of an annotation."""

_SCALARS: dict[Any, Callable[[_Metadata], Any]] = {
    AwareDatetime: lambda metadata: Annotated[str, msgspec.Meta(pattern=_UTC)],
    int: lambda metadata: Annotated[int, _meta(metadata, **_INT64)],
    float: lambda metadata: Annotated[float, _meta(metadata)],
    str: lambda metadata: Annotated[str, _meta(metadata)],
    bool: lambda metadata: bool,
    dict[str, str]: lambda metadata: dict[str, str],
}
"""By the annotation itself."""


def _meta(metadata: _Metadata, **bounds_of_kind: int) -> msgspec.Meta:
    limits: dict[str, Any] = dict(bounds_of_kind)
    for item in metadata:
        name = _LIMITS.get(type(item))
        if name is None:
            raise TypeError(f"no counterpart for the constraint {item!r}")
        limits[name] = getattr(item, name)
    return msgspec.Meta(**limits)
