"""`onlinerl query`: SQL on the views, printed as a table or written as JSON, CSV or Parquet.

The connection can read the views and nothing else: no files, no network, no settings.
"""

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Literal

import duckdb
import pyarrow as pa
from pyarrow import csv, parquet

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.snapshots import readable
from onlinerl.rollout_store.store import DeltaStore
from onlinerl.rollout_store.views import connect

if TYPE_CHECKING:
    from onlinerl.config import Settings

Format = Literal["table", "json", "csv", "parquet"]

_MAX_CELL = 80
_WIDTH_OF_A_FILE = 100_000
"""Columns of a table that no terminal shows: its lines are as long as their cells."""
_MAX_SHOWN_ROWS = 1_000


def run_query(
    settings: "Settings", sql: str, format: Format = "table", snapshot: str | None = None
) -> int:
    """Run one statement and write its result to standard output.

    With the name of a snapshot, on the rows that it holds.

    Raises:
        ConfigError: the SQL is wrong or not a query, there are no tables yet, or the snapshot
            cannot be read.
    """
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    if not store.versions():
        raise ConfigError(
            f"there are no tables under {store.root}; `onlinerl ingest` creates them, "
            "and [store].root says where they are"
        )
    versions = None
    if snapshot is not None:
        versions = readable(store, snapshot, at=datetime.now(UTC)).versions
    result = query(store, sql, settings=settings, versions=versions)
    if format == "table":
        _print_table(result)
    elif format == "json":
        json.dump(result.to_pylist(), sys.stdout, default=_json_value, ensure_ascii=False)
        sys.stdout.write("\n")
    elif format == "csv":
        csv.write_csv(_flat(result), sys.stdout.buffer)
    else:
        # Parquet needs a file that can tell its position, which a pipe cannot.
        buffer = pa.BufferOutputStream()
        parquet.write_table(result, buffer)
        sys.stdout.buffer.write(buffer.getvalue().to_pybytes())
    sys.stdout.flush()
    return 0


def query(
    store: DeltaStore,
    sql: str,
    *,
    settings: "Settings",
    versions: Mapping[str, int] | None = None,
) -> pa.Table:
    """The result of one statement, with everything but reading the views locked.

    Columns of one name get a number behind it, for no format could tell them apart.

    Raises:
        ConfigError: the SQL is wrong or gives no result.
    """
    with connect(
        store, rewards=settings.rewards, versions=versions, limits=settings.store
    ) as connection:
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        try:
            relation = connection.sql(sql)
            if relation is None:
                raise ConfigError("the statement gives no result; write a SELECT")
            result: pa.Table = relation.to_arrow_table()
            return result.rename_columns(_told_apart(result.column_names))
        except duckdb.Error as error:
            raise ConfigError(f"the query failed: {error}") from error


def _told_apart(names: Sequence[str]) -> list[str]:
    """The first of several equal names stays; none becomes like another that was given."""
    given, told = set(names), dict[str, None]()
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        free = (each for each in numbered if each not in given and each not in told)
        told[name if name not in told else next(free)] = None
    return list(told)


def _print_table(result: pa.Table) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=False)
    for name in result.column_names:
        table.add_column(name, overflow="fold")
    for row in result.slice(0, _MAX_SHOWN_ROWS).to_pylist():
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
    console.print(table, markup=False)
    if result.num_rows > _MAX_SHOWN_ROWS:
        console.print(f"the first {_MAX_SHOWN_ROWS} of {result.num_rows} rows")


def _cell(value: object) -> str:
    text = "" if value is None else str(_rounded(value))
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def _rounded(value: object) -> object:
    """Six significant digits of every float; the other formats keep all of them."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return value


def _flat(result: pa.Table) -> pa.Table:
    """Nested columns and bytes as JSON text, which is all that CSV can hold."""
    columns = {
        field.name: [_json_text(value) for value in result[field.name].to_pylist()]
        if pa.types.is_nested(field.type) or pa.types.is_binary(field.type)
        else result[field.name]
        for field in result.schema
    }
    return pa.table(columns)


def _json_text(value: object) -> str | None:
    return None if value is None else json.dumps(value, default=_json_value, ensure_ascii=False)


def _json_value(value: Any) -> str:  # noqa: ANN401 - the signature that json calls
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    return str(value)
