"""`onlinerl query`: SQL on the views, printed as a table or written as JSON, CSV or Parquet.

The SQL can read the views and nothing else: no files, no network, no settings.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import singledispatch
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
"""Characters per line of a table that is not printed on a terminal, so that no line is wrapped."""
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

    Args:
        store: Where the tables lie.
        sql: One `SELECT` on the views.
        format: Format of the output.
        snapshot: Name of the snapshot to read; the newest versions when absent.
        rewards: How feedback becomes a reward.
        limits: Memory and threads of the query.

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
        json.dump(_json_value(result.to_pylist()), sys.stdout, ensure_ascii=False, allow_nan=False)
        sys.stdout.write("\n")
    elif format == "csv":
        csv.write_csv(_with_text(result, replaces=_is_unknown_to_csv), sys.stdout.buffer)
    else:
        # The Parquet writer asks for the position in the file, which a pipe does not have.
        buffer = pa.BufferOutputStream()
        parquet.write_table(_with_text(result, replaces=_is_unknown_to_parquet), buffer)
        sys.stdout.buffer.write(buffer.getvalue().to_pybytes())
    sys.stdout.flush()
    return 0


def existing_tables(store: DeltaStore) -> dict[str, int]:
    """The newest version of every table that exists.

    Raises:
        ConfigError: there are no tables yet.
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
    """The result of one statement, which can only read the views.

    Columns with the same name get a number appended, because no format could tell them apart.

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
            return result.rename_columns(_unique_names(result.column_names))
        except duckdb.Error as error:
            raise ConfigError(f"the query failed: {error}") from error


def _unique_names(names: Sequence[str]) -> list[str]:
    """Number the second and later of equal names; a new name never equals a given one."""
    given, unique = set(names), dict[str, None]()
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        free = (each for each in numbered if each not in given and each not in unique)
        unique[name if name not in unique else next(free)] = None
    return list(unique)


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
    """The value with six significant digits in every float; other formats keep all digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, pa.MonthDayNano):
        return _interval_text(value)
    return value


def _with_text(result: pa.Table, *, replaces: Callable[[pa.DataType], bool]) -> pa.Table:
    """The table with columns of some types as text: intervals as in DuckDB, others as JSON."""
    columns = {
        field.name: pa.array(map(_text, result[field.name].to_pylist()), pa.string())
        if replaces(field.type)
        else result[field.name]
        for field in result.schema
    }
    return pa.table(columns)


def _is_unknown_to_csv(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_interval(kind))


def _is_unknown_to_parquet(kind: pa.DataType) -> bool:
    """Whether the type is or contains an interval or a union."""
    if pa.types.is_interval(kind) or pa.types.is_union(kind):
        return True
    return any(_is_unknown_to_parquet(kind.field(number).type) for number in range(kind.num_fields))


def _text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, pa.MonthDayNano):
        return _interval_text(value)
    return json.dumps(_json_value(value), ensure_ascii=False, allow_nan=False)


@singledispatch
def _json_value(value: Any) -> Any:  # noqa: ANN401 - whatever a row holds
    """The value as JSON can represent it; types without a rule become text.

    DuckDB makes decimals of integer sums, and NaN is not JSON.
    """
    return str(value)


@_json_value.register
def _(value: str | int | None) -> str | int | None:
    return value


@_json_value.register
def _(value: float) -> float | None:
    return value if math.isfinite(value) else None


@_json_value.register
def _(value: Decimal) -> int | float:
    numerator, denominator = value.as_integer_ratio()
    return numerator if denominator == 1 else float(value)


@_json_value.register
def _(value: dict) -> dict[str, Any]:  # type: ignore[type-arg]
    return {name: _json_value(item) for name, item in value.items()}


@_json_value.register
def _(value: list | tuple) -> list[Any]:  # type: ignore[type-arg]
    return [_json_value(item) for item in value]


@_json_value.register
def _(value: date) -> str:
    return value.isoformat()


@_json_value.register
def _(value: bytes) -> str:
    return value.decode("utf-8", errors="backslashreplace")


def _interval_text(value: pa.MonthDayNano) -> str:
    """The interval as DuckDB writes and reads it, e.g. `1 year 2 months 3 days 04:05:06.5`."""
    years = math.trunc(value.months / 12)
    units = {"year": years, "month": value.months - 12 * years, "day": value.days}
    parts = [f"{n} {unit}{'' if abs(n) == 1 else 's'}" for unit, n in units.items() if n]
    if value.nanoseconds or not parts:
        seconds, micros = divmod(abs(value.nanoseconds) // 1_000, 1_000_000)
        sign = "-" if value.nanoseconds < 0 else ""
        time = f"{sign}{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        parts.append(f"{time}.{micros:06}".rstrip("0") if micros else time)
    return " ".join(parts)


_json_value.register(pa.MonthDayNano, _interval_text)
