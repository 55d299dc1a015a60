"""Removes mentions of an erased person from tables that record what was done, such as `audit`.

Such a row comes from no event and documents an act, so the row stays and only the text that names
the person is overwritten.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa

from onlinerl.rollout_store.tables.deletion import microseconds, until_committed
from onlinerl.rollout_store.tables.delta_store import WRITER_PROPERTIES, DeltaStore
from onlinerl.rollout_store.tables.sql import literal

REDACTED = "erased"
_REDACTED_JSON = '{"erased": true}'
_KEYS = {
    "audit": ("audit_id", "acted_at"),
    "snapshots": ("name", "acted_at"),
    "promotions": ("promotion_id", "decided_at"),
    "arms": ("decision_id", "decided_at"),
}
"""By table, the two columns that identify a row: a name and a time."""


def redact(store: DeltaStore, table: str, *, names_person: Callable[[bytes], bool]) -> int:
    """Overwrite every text of the newest version that names the person.

    Args:
        store: Where the tables lie.
        table: A table that holds no events; nothing is done to any other table.
        names_person: Whether a text names the person.

    Returns:
        The number of rows that were changed.
    """
    if table not in _KEYS:
        return 0
    return sum(
        _overwrite(store, table, condition, values)
        for condition, values in _redactions(store, table, names_person)
    )


def _redactions(
    store: DeltaStore, table: str, names_person: Callable[[bytes], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The condition of each row to change, and its new values.

    The table's log keeps the condition, so the condition must not name the person either.
    """
    key, time_column = _KEYS[table]
    rows = store.dataset(table).to_table()
    texts = [f.name for f in rows.schema if pa.types.is_string(f.type) or f.type == "string_view"]
    for row in rows.select([*texts, time_column]).to_pylist():
        columns = [name for name in texts if row[name] and names_person(row[name].encode())]
        if columns:
            condition = _is_at(time_column, row[time_column])
            if key not in columns:
                condition += f" AND {key} = {literal(row[key])}"
            yield (
                condition,
                {name: _REDACTED_JSON if name == "detail" else REDACTED for name in columns},
            )


def _overwrite(store: DeltaStore, table: str, condition: str, values: dict[str, Any]) -> int:
    figures = until_committed(
        lambda: store.delta(table).update(
            new_values=values, predicate=condition, writer_properties=WRITER_PROPERTIES
        ),
        attempt=f"redact table {table}",
    )
    return int(figures.get("num_updated_rows", 0))


def _is_at(column: str, at: datetime) -> str:
    return f"CAST({column} AS BIGINT) = {microseconds(at)}"
