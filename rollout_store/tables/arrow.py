"""Derives Arrow schemas from the row models of `schema`."""

import types
import typing
from collections.abc import Callable
from datetime import date, datetime
from typing import Annotated, Literal, get_args, get_origin

import pyarrow as pa
from pydantic import AwareDatetime, BaseModel, PlainSerializer
from pydantic.fields import FieldInfo

_TIME = pa.timestamp("us", tz="UTC")
_SCALARS: dict[object, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    datetime: _TIME,
    AwareDatetime: _TIME,
    date: pa.date32(),
}


def arrow_schema(model: type[BaseModel]) -> pa.Schema:
    """The `pyarrow.Schema` of a row model; nested models become structs.

    Raises:
        TypeError: an annotation has no Arrow type.
    """
    return pa.schema(
        [
            pa.field(name, _field_type(field), nullable=_is_nullable(field.annotation))
            for name, field in model.model_fields.items()
        ]
    )


def _is_nullable(annotation: object) -> bool:
    return types.NoneType in get_args(annotation)


def _field_type(field: FieldInfo) -> pa.DataType:
    # Only token ids and logprobs have a serializer; they are stored with 32 bits.
    if any(isinstance(item, PlainSerializer) for item in field.metadata):
        element = pa.int32() if get_args(field.annotation) == (int,) else pa.float32()
        return _list_of(element)
    return _arrow_type(field.annotation)


def _arrow_type(annotation: object) -> pa.DataType:
    generic = _GENERICS.get(get_origin(annotation))
    if generic is not None:
        return generic(*get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return pa.struct(list(arrow_schema(annotation)))
    try:
        return _SCALARS[annotation]
    except KeyError:
        raise TypeError(f"no Arrow type for {annotation!r}") from None


def _optional(*members: object) -> pa.DataType:
    (inner,) = (member for member in members if member is not types.NoneType)
    return _arrow_type(inner)


def _list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element, nullable=False))


_GENERICS: dict[object, Callable[..., pa.DataType]] = {
    typing.Union: _optional,
    types.UnionType: _optional,
    Annotated: lambda annotation, *_: _arrow_type(annotation),
    Literal: lambda *_: pa.string(),
    list: lambda element: _list_of(_arrow_type(element)),
    dict: lambda *_: pa.map_(pa.string(), pa.string()),
}
"""The Arrow type of a generic annotation, from its arguments, by its origin."""
