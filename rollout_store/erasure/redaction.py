"""Mentions of an erased person in tables whose rows are acts, taken out of them.

Such a row came from no event and says that something was done, so it stays: only the text that
names the person goes.
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
"""By table the columns that tell its rows apart: a name, and when it was."""


def redact(store: DeltaStore, table: str, *, names_them: Callable[[bytes], bool]) -> int:
    """Overwrite every text of the newest version that names them; returns the number of rows.

    Args:
        store: Where the tables lie.
        table: One that holds no events; others are left alone.
        names_them: Whether a text does.
    """
    if table not in _KEYS:
        return 0
    return sum(_overwrite(store, table, *found) for found in _found(store, table, names_them))


def _found(
    store: DeltaStore, table: str, names_them: Callable[[bytes], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Conditions that say nothing of them either, for the log keeps these; and new values."""
    key, time_column = _KEYS[table]
    rows = store.dataset(table).to_table()
    texts = [f.name for f in rows.schema if pa.types.is_string(f.type) or f.type == "string_view"]
    for row in rows.select([*texts, time_column]).to_pylist():
        named = [name for name in texts if row[name] and names_them(row[name].encode())]
        if named:
            condition = _at(time_column, row[time_column])
            if key not in named:
                condition += f" AND {key} = {literal(row[key])}"
            yield (
                condition,
                {name: _REDACTED_JSON if name == "detail" else REDACTED for name in named},
            )


def _overwrite(store: DeltaStore, table: str, condition: str, values: dict[str, Any]) -> int:
    done = until_committed(
        lambda: store.delta(table).update(
            new_values=values, predicate=condition, writer_properties=WRITER_PROPERTIES
        ),
        attempt=f"redact table {table}",
    )
    return int(done.get("num_updated_rows", 0))


def _at(column: str, at: datetime) -> str:
    return f"CAST({column} AS BIGINT) = {microseconds(at)}"
