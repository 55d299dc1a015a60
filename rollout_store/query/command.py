"""`onlinerl query`: SQL on the views, printed as a table or written as JSON, CSV or Parquet.

The connection can read the views and nothing else: no files, no network, no settings.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal

import duckdb
import pyarrow as pa
from pyarrow import csv, parquet

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import RewardsConfig, StoreConfig
from onlinerl.rollout_store.snapshots.named import readable
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect

Format = Literal["table", "json", "csv", "parquet"]

_MAX_CELL = 80
_WIDTH_OF_A_FILE = 100_000
"""Columns of a table that no terminal shows: its lines are as long as their cells."""
_MAX_SHOWN_ROWS = 1_000


def run_query(
    store: DeltaStore,
    sql: str,
    format: Format = "table",
    snapshot: str | None = None,
    *,
    rewards: RewardsConfig,
    limits: StoreConfig,
) -> int:
    """Run one statement and write its result to standard output.

    With the name of a snapshot, on the rows that it holds.

    Raises:
        ConfigError: the SQL is wrong or not a query, there are no tables yet, or the snapshot
            cannot be read.
    """
    existing_tables(store)
    versions = None
    if snapshot is not None:
        versions = readable(store, snapshot, at=datetime.now(UTC)).versions
    result = query(store, sql, rewards=rewards, limits=limits, versions=versions)
    if format == "table":
        _print_table(result)
    elif format == "json":
        json.dump(_plain(result.to_pylist()), sys.stdout, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
    elif format == "csv":
        csv.write_csv(_with_text(result, instead_of=_is_not_of_csv), sys.stdout.buffer)
    else:
        # Parquet needs a file that can tell its position, which a pipe cannot.
        buffer = pa.BufferOutputStream()
        parquet.write_table(_with_text(result, instead_of=_is_not_of_parquet), buffer)
        sys.stdout.buffer.write(buffer.getvalue().to_pybytes())
    sys.stdout.flush()
    return 0


def existing_tables(store: DeltaStore) -> dict[str, int]:
    """The newest version of every table that exists.

    Raises:
        ConfigError: there is none.
    """
    versions = store.versions()
    if not versions:
        raise ConfigError(
            f"there are no tables under {store.root}; `onlinerl ingest` creates them, "
            "and [store].root says where they are"
        )
    return versions


def query(
    store: DeltaStore,
    sql: str,
    *,
    rewards: RewardsConfig,
    limits: StoreConfig,
    versions: Mapping[str, int] | None = None,
) -> pa.Table:
    """The result of one statement, with everything but reading the views locked.

    Columns of one name get a number behind it, for no format could tell them apart.

    Raises:
        ConfigError: the SQL is wrong or gives no result.
    """
    with connect(store, rewards=rewards, versions=versions, limits=limits) as connection:
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
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE, emoji=False)
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
    if isinstance(value, pa.MonthDayNano):
        return _interval_text(value)
    return value


def _with_text(result: pa.Table, *, instead_of: Callable[[pa.DataType], bool]) -> pa.Table:
    """Columns of some types as text: intervals as DuckDB writes them, the others as JSON."""
    columns = {
        field.name: pa.array(map(_text, result[field.name].to_pylist()), pa.string())
        if instead_of(field.type)
        else result[field.name]
        for field in result.schema
    }
    return pa.table(columns)


def _is_not_of_csv(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_interval(kind))


def _is_not_of_parquet(kind: pa.DataType) -> bool:
    """Intervals and unions, also inside of others."""
    if pa.types.is_interval(kind) or pa.types.is_union(kind):
        return True
    return any(_is_not_of_parquet(kind.field(number).type) for number in range(kind.num_fields))


def _text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, pa.MonthDayNano):
        return _interval_text(value)
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a row holds
    """A value of what JSON has: no decimals, which DuckDB makes of sums, no NaN, no times."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        numerator, denominator = value.as_integer_ratio()
        return numerator if denominator == 1 else float(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, pa.MonthDayNano):
        return _interval_text(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    return str(value)


def _interval_text(value: pa.MonthDayNano) -> str:
    """As DuckDB writes and reads it, e.g. `1 year 2 months 3 days 04:05:06.5`."""
    years = math.trunc(value.months / 12)
    units = {"year": years, "month": value.months - 12 * years, "day": value.days}
    parts = [f"{n} {unit}{'' if abs(n) == 1 else 's'}" for unit, n in units.items() if n]
    if value.nanoseconds or not parts:
        seconds, micros = divmod(abs(value.nanoseconds) // 1_000, 1_000_000)
        sign = "-" if value.nanoseconds < 0 else ""
        time = f"{sign}{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        parts.append(f"{time}.{micros:06}".rstrip("0") if micros else time)
    return " ".join(parts)
