"""Turns decoded events into Arrow columns, without a Python number per token."""

import functools
import operator
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An array of one type.

    Args:
        values: None, scalars, packed numbers as bytes, or structs with the fields of `kind`.
        kind: Type of the column, as the table's schema has it.

    Raises:
        ValueError, OverflowError, TypeError: The type cannot hold a value.
    """
    # The first value usually shows that a column is not empty, and counting None is quick.
    if not values or (values[0] is None and values.count(None) == len(values)):
        return pa.nulls(len(values), kind)
    if pa.types.is_list(kind):
        return _lists(values, kind)
    if pa.types.is_struct(kind):
        return _structs(values, kind)
    if pa.types.is_map(kind):
        pairs = [None if value is None else list(value.items()) for value in values]
        return pa.array(pairs, kind)
    if pa.types.is_timestamp(kind):
        return pa.array([_instant(value) for value in values], kind)
    return pa.array(values, kind)


def constant(value: object, kind: pa.DataType, length: int) -> pa.Array:
    """An array that repeats one value `length` times."""
    return pa.repeat(pa.scalar(value, kind), length)


@functools.cache
def field_getter(name: str) -> Callable[[Any], Any]:
    """A function that reads this field of a struct."""
    return operator.attrgetter(name)


def _instant(value: str | datetime | None) -> datetime | None:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def _lists(values: Sequence[Any], kind: pa.ListType) -> pa.Array:
    present = [() if value is None else value for value in values]
    lengths = np.fromiter(map(len, present), dtype=np.int64, count=len(present))
    packed = pa.types.is_primitive(kind.value_type)
    if packed:
        width = kind.value_type.bit_width // 8
        data = b"".join(value or b"" for value in values)
        lengths //= width
        items = pa.Array.from_buffers(
            kind.value_type, len(data) // width, [None, pa.py_buffer(data)]
        )
    else:
        items = column([item for value in present for item in value], kind.value_type)
    ends = lengths.cumsum()
    if len(ends) and ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError("a batch holds more list items than its offsets can count")
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    offsets[1:] = ends
    missing = [value is None for value in values]
    mask = pa.array(missing, pa.bool_()) if any(missing) else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, type=kind, mask=mask)


def _structs(values: Sequence[Any], kind: pa.StructType) -> pa.Array:
    fields = list(kind)
    missing = [value is None for value in values]
    if not any(missing):
        children = [
            column(list(map(field_getter(field.name), values)), field.type) for field in fields
        ]
        return pa.StructArray.from_arrays(children, fields=fields)
    # No event has an optional struct yet. This conversion is slow and right for any.
    names = [field.name for field in fields]
    plain = [v if v is None else {name: getattr(v, name) for name in names} for v in values]
    return pa.array(plain, kind)
