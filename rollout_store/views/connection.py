"""The DuckDB views: the public way to read the tables.

Views are pinned to table versions, so that the rows of a training window can be read again later.
They remove events that were stored twice. Nothing here writes to the tables.
"""

import tempfile
import uuid
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
from pyarrow.dataset import Dataset

from onlinerl.rollout_store.config import RewardsConfig, StoreConfig
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import schema_of
from onlinerl.rollout_store.views.feedback import (
    demonstrations_view,
    feedback_use_view,
    signals_view,
)
from onlinerl.rollout_store.views.rewards import reward_view, turns_view
from onlinerl.rollout_store.views.scope import Scope, find_trees
from onlinerl.rollout_store.views.segments import (
    lengths_view,
    mask_macro,
    prompt_pieces_view,
    prompts_view,
    segments_view,
)
from onlinerl.rollout_store.views.sql_files import read_sql
from onlinerl.rollout_store.views.suspicions import suspicions_view

VIEWS = (
    *TABLES,
    "rewards",
    "sessions",
    "prompts",
    "segments",
    "feedback_use",
    "demonstrations",
    "suspicions",
)
"""Every public view; `docs/tables.md` lists their columns."""

_IDENTITY = {
    "interactions": ("tenant", "interaction_id", "choice_index"),
    "feedback": ("tenant", "feedback_id"),
    "dead_letters": ("topic", "partition", '"offset"', "payload"),
    "promotions": ("promotion_id",),
    "audit": ("audit_id",),
    "arms": ("decision_id", "arm"),
    "snapshots": ("name", "action", "acted_at"),
    "erased": ("erasure_id", "kind", "digest"),
}
"""The columns in which two copies of the same row agree."""

_AGE = {
    "interactions": 'ingested_at, partition, "offset"',
    "feedback": 'ingested_at, partition, "offset"',
    "dead_letters": "ingested_at",
    "promotions": '"decided_at"',
    "audit": '"acted_at"',
    "arms": '"decided_at"',
    "snapshots": '"acted_at"',
    "erased": '"acted_at"',
}
"""Columns that order the copies of a row; the first copy is kept."""


def connect(
    store: DeltaStore,
    *,
    rewards: RewardsConfig,
    versions: Mapping[str, int] | None = None,
    as_of: datetime | None = None,
    scope: Scope | None = None,
    limits: StoreConfig | None = None,
) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB with every view of `VIEWS`.

    Args:
        store: Where the tables lie; a table that does not exist yet reads as empty.
        rewards: How feedback becomes a reward.
        versions: Table versions to pin, e.g. from `DeltaStore.versions`. Other tables are pinned to
            their newest version. All views stay the same while the connection is open.
        as_of: The time at which rewards are mature; now when absent.
        scope: Read only the days that this scope needs; everything when absent. `prompts` and
            `segments` then have exactly the rows in scope, with the same contents as without a
            scope. `interactions`, `feedback` and views that count their rows have at least the
            rows in scope.
        limits: Memory and threads of a query; the defaults of `[store]` when absent.

    Raises:
        ServiceUnavailable: the storage does not answer, or a pinned version was cleaned away.
    """
    connection = duckdb.connect(":memory:")
    try:
        _limit(connection, limits or StoreConfig())
        ingested_from = (
            {}
            if scope is None
            else _ingested_from(connection, store, versions, scope, rewards=rewards)
        )
        for table in TABLES:
            _add_table(connection, store, table, versions, ingested_from=ingested_from.get(table))
        for view in _views(rewards, as_of=as_of or datetime.now(UTC), scoped=scope is not None):
            connection.execute(view)
    except BaseException:
        connection.close()
        raise
    return connection


def _limit(connection: duckdb.DuckDBPyConnection, limits: StoreConfig) -> None:
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute(f"SET memory_limit = '{limits.query_memory_mib}MiB'")
    # By default a query that exceeds its memory would spill into the current folder. The folder is
    # private to this connection, because SQL may read and write below it. DuckDB creates it when it
    # is needed and removes it again.
    spill = Path(tempfile.gettempdir()) / f"onlinerl-query-{uuid.uuid4().hex}"
    connection.execute("SET temp_directory = ?", [str(spill)])
    # The progress bar would be drawn into the output of every query longer than two seconds.
    connection.execute("SET enable_progress_bar = false")
    # DuckDB expects one row of an Arrow scan, and for few rows an ASOF join compares all pairs.
    connection.execute("SET asof_loop_join_threshold = 0")
    if limits.query_threads:
        connection.execute(f"SET threads = {limits.query_threads}")


def _ingested_from(
    connection: duckdb.DuckDBPyConnection,
    store: DeltaStore,
    versions: Mapping[str, int] | None,
    scope: Scope,
    *,
    rewards: RewardsConfig,
) -> dict[str, date]:
    """The first day that the scope needs, by table; also creates the tables of the scope."""
    connection.register("stored_interactions", _stored(store, "interactions", versions, None))
    first = find_trees(connection, scope, rewards=rewards)
    no_day = date.max - timedelta(days=1)
    return {
        "interactions": first.interactions or no_day,
        "feedback": first.feedback or no_day,
    }


def _views(rewards: RewardsConfig, *, as_of: datetime, scoped: bool) -> list[str]:
    """Every view over the tables; a view comes after the views that it reads."""
    return [
        turns_view(),
        signals_view(rewards),
        feedback_use_view(rewards),
        suspicions_view(rewards),
        reward_view(rewards, as_of=as_of),
        read_sql("sessions"),
        mask_macro(),
        lengths_view(scoped=scoped),
        prompt_pieces_view(),
        prompts_view(scoped=scoped),
        segments_view(scoped=scoped),
        demonstrations_view(),
    ]


def _add_table(
    connection: duckdb.DuckDBPyConnection,
    store: DeltaStore,
    table: str,
    versions: Mapping[str, int] | None,
    *,
    ingested_from: date | None,
) -> None:
    rows = _stored(store, table, versions, ingested_from)
    connection.register(f"stored_{table}", rows)
    connection.execute(_deduplicated(table))


def _stored(
    store: DeltaStore,
    table: str,
    versions: Mapping[str, int] | None,
    ingested_from: date | None,
) -> Dataset | pa.Table:
    version = (versions or {}).get(table)
    if version is None and not store.exists(table):
        return schema_of(TABLES[table]).empty_table()
    dataset = store.dataset(table, version=version, ingested_from=ingested_from)
    return with_every_column(dataset, table)


def with_every_column(stored: Dataset, table: str) -> Dataset:
    """The table with columns in the order of the row model; missing columns read as null."""
    present = {field.name: field for field in stored.schema}
    declared = schema_of(TABLES[table])
    fields = [present.pop(field.name, field.with_nullable(True)) for field in declared]
    return stored.replace_schema(pa.schema([*fields, *present.values()]))


def _deduplicated(table: str) -> str:
    identity, age = ", ".join(_IDENTITY[table]), _AGE[table]
    if table not in ("interactions", "feedback"):
        return f"""
CREATE VIEW {table} AS
SELECT * FROM stored_{table}
QUALIFY row_number() OVER (PARTITION BY {identity} ORDER BY {age}) = 1
"""
    # These rows are many and wide, and repeats are rare. So repeats are found in narrow columns,
    # and the rows themselves are streamed without sorting.
    return f"""
CREATE VIEW {table} AS
SELECT t.* FROM stored_{table} AS t
LEFT JOIN (
    SELECT {identity}, min(({age})) AS kept
    FROM stored_{table} GROUP BY {identity} HAVING count(*) > 1
) AS repeated USING ({identity})
WHERE repeated.kept IS NULL OR repeated.kept = (t.ingested_at, t.partition, t."offset")
"""
