"""Typed decoders of events, derived from the event models of the schema.

They accept less than the models do (no coercion, one form of a timestamp) and give the same values
for what they accept: whatever they refuse is given to the models, which know the reason. Packed
token arrays stay bytes here; no list of numbers is made.
"""

import functools
import types
import typing
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types as bounds
import msgspec
from pydantic import AwareDatetime, BaseModel, PlainSerializer
from pydantic.fields import FieldInfo

_INT64 = {"ge": -(2**63), "le": 2**63 - 1}
_UTC = r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z\Z"
"""The form of a timestamp that the models write; all other forms are theirs to read."""


@functools.cache
def struct_of(model: type[BaseModel], *, keep_unknown: bool = False) -> type[msgspec.Struct]:
    """The struct with the fields of an event model.

    Args:
        model: An event, or a part of one.
        keep_unknown: Whether fields that the model does not declare are passed over; otherwise
            they are an error, so that nobody loses them unseen.

    Raises:
        TypeError: for an annotation without a counterpart.
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


def _type(annotation: Any, metadata: tuple[Any, ...], *, keep_unknown: bool) -> Any:  # noqa: ANN401
    if any(isinstance(item, PlainSerializer) for item in metadata):
        return bytes
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (item for item in args if item is not types.NoneType)
        return _type(inner, metadata, keep_unknown=keep_unknown) | None
    if origin is Annotated:
        return _type(args[0], (*args[1:], *metadata), keep_unknown=keep_unknown)
    if origin is list:
        item = _type(args[0], (), keep_unknown=keep_unknown)
        return Annotated[list[item], _meta(metadata)]  # type: ignore[valid-type]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return struct_of(annotation, keep_unknown=keep_unknown)
    if annotation is AwareDatetime:
        return Annotated[str, msgspec.Meta(pattern=_UTC)]
    if annotation is int:
        return Annotated[int, _meta(metadata, **_INT64)]
    if annotation in (str, float):
        return Annotated[annotation, _meta(metadata)]
    if origin is Literal or annotation is bool or annotation == dict[str, str]:
        return annotation
    raise TypeError(f"no decoder for {annotation!r}")


def _meta(metadata: tuple[Any, ...], **bounds_of_kind: int) -> msgspec.Meta:
    limits: dict[str, Any] = dict(bounds_of_kind)
    for item in metadata:
        if isinstance(item, bounds.Ge):
            limits["ge"] = item.ge
        elif isinstance(item, bounds.Gt):
            limits["gt"] = item.gt
        elif isinstance(item, bounds.Le):
            limits["le"] = item.le
        elif isinstance(item, bounds.MinLen):
            limits["min_length"] = item.min_length
        elif isinstance(item, bounds.MaxLen):
            limits["max_length"] = item.max_length
        else:
            raise TypeError(f"no counterpart for the constraint {item!r}")
    return msgspec.Meta(**limits)
