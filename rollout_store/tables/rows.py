"""Turns row models into Arrow tables."""

import functools
from collections.abc import Sequence

import pyarrow as pa
from pydantic import BaseModel

from onlinerl.rollout_store.tables.arrow import arrow_schema


@functools.cache
def schema_of(row_type: type[BaseModel]) -> pa.Schema:
    """The Arrow schema of a row model, cached."""
    return arrow_schema(row_type)


def to_table(models: Sequence[BaseModel], *, row_type: type[BaseModel] | None = None) -> pa.Table:
    """The rows as an Arrow table, without fields that the row model does not declare.

    Args:
        models: Rows of one type.
        row_type: Type of the rows; needed only when `models` may be empty.

    Raises:
        ValueError, OverflowError: a column cannot hold a value.
    """
    if row_type is None:
        if not models:
            raise ValueError("name the row_type of an empty table")
        row_type = type(models[0])
    return pa.Table.from_pylist([model.model_dump() for model in models], schema_of(row_type))
