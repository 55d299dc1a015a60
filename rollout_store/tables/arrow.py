"""Arrow schemas from row models: what `schema` declares, as columns."""

import types
import typing
from datetime import date, datetime
from typing import Annotated, Literal, get_args, get_origin

import pyarrow as pa
from pydantic import AwareDatetime, BaseModel, PlainSerializer
from pydantic.fields import FieldInfo


def arrow_schema(model: type[BaseModel]) -> pa.Schema:
    """The `pyarrow.Schema` of a row model; nested models become structs.

    Raises:
        TypeError: for an annotation without an Arrow counterpart.
    """
    return pa.schema(
        [
            pa.field(name, _arrow_type(field), nullable=_is_nullable(field.annotation))
            for name, field in model.model_fields.items()
        ]
    )


def _is_nullable(annotation: object) -> bool:
    return types.NoneType in get_args(annotation)


def _arrow_type(field: FieldInfo) -> pa.DataType:
    packed = [item for item in field.metadata if isinstance(item, PlainSerializer)]
    if packed:
        element = pa.int32() if get_args(field.annotation) == (int,) else pa.float32()
        return pa.list_(pa.field("element", element, nullable=False))
    return _plain_arrow_type(field.annotation)


def _plain_arrow_type(annotation: object) -> pa.DataType:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (item for item in args if item is not types.NoneType)
        return _plain_arrow_type(inner)
    if origin is Annotated:
        return _plain_arrow_type(args[0])
    if origin is Literal:
        return pa.string()
    if origin is list:
        return pa.list_(pa.field("element", _plain_arrow_type(args[0]), nullable=False))
    if origin is dict:
        return pa.map_(pa.string(), pa.string())
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return pa.struct(list(arrow_schema(annotation)))
    scalars = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
        bytes: pa.binary(),
        datetime: pa.timestamp("us", tz="UTC"),
        date: pa.date32(),
    }
    for python_type, arrow_type in scalars.items():
        if annotation is python_type:
            return arrow_type
    if annotation is AwareDatetime:
        return pa.timestamp("us", tz="UTC")
    raise TypeError(f"no Arrow type for {annotation!r}")
