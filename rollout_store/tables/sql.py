"""Writes Python values as SQL text, because the definition of a view takes no parameters."""

from collections.abc import Sequence
from datetime import UTC, datetime

Value = str | float | int | bool | datetime | None


def literal(value: Value) -> str:
    """An SQL literal with the same value, quoted so that no text can break out of it."""
    if value is None:
        return "NULL"
    if isinstance(value, datetime):
        return f"TIMESTAMPTZ '{value.astimezone(UTC).isoformat()}'"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, float):
        return f"({value!r})::DOUBLE"
    return str(value).lower() if isinstance(value, bool) else str(value)


def values_table(header: str, rows: Sequence[Sequence[Value]], *, empty: Sequence[Value]) -> str:
    """A common table expression of literal rows.

    Args:
        header: Name and columns, e.g. `metrics(metric, weight)`.
        rows: The rows; may be empty.
        empty: A row that gives the column types if there are no rows; it is not part of the result.
    """
    lines = ", ".join(f"({', '.join(map(literal, row))})" for row in (rows or [empty]))
    condition = "" if rows else " WHERE false"
    return f"{header} AS (SELECT * FROM (VALUES {lines}){condition})"
