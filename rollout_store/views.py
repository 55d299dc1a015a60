"""The DuckDB views: the public way to read the tables.

Views are pinned to table versions, so what a training window saw can be read again later, and they
take out events that were stored twice. Nothing here writes.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

import duckdb
import pyarrow as pa
from pyarrow.dataset import Dataset

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.reward_view import reward_view
from onlinerl.rollout_store.rows import schema_of
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.segment_view import PROMPT_PIECES_VIEW, PROMPTS_VIEW, SEGMENTS_VIEW
from onlinerl.rollout_store.store import DeltaStore

VIEWS = (*TABLES, "rewards", "sessions", "prompts", "segments")
"""Every public view; `docs/tables.md` has their columns."""

_IDENTITY = {
    "interactions": ("tenant", "interaction_id", "choice_index"),
    "feedback": ("tenant", "feedback_id"),
    "dead_letters": ("topic", "partition", '"offset"', "payload"),
    "promotions": ("promotion_id",),
    "audit": ("audit_id",),
    "arms": ("decision_id", "arm"),
    "snapshots": ("name", "action", "acted_at"),
}
"""What makes two rows of a table the same one."""

_AGE = {
    "interactions": 'ingested_at, partition, "offset"',
    "feedback": 'ingested_at, partition, "offset"',
    "dead_letters": "ingested_at",
    "promotions": '"decided_at"',
    "audit": '"acted_at"',
    "arms": '"decided_at"',
    "snapshots": '"acted_at"',
}
"""Of the same row stored twice, the first by these columns is kept."""

_SESSIONS_VIEW = """
CREATE VIEW sessions AS
SELECT i.session_id, i.tenant,
    count(DISTINCT i.interaction_id) AS num_interactions,
    count(*) AS num_completions,
    sum(len(i.completion_token_ids))::BIGINT AS num_tokens,
    min(i.served_at) AS first_at,
    max(i.served_at) AS last_at,
    count(r.reward) AS num_labelled,
    avg(r.reward) AS reward
FROM interactions AS i
LEFT JOIN rewards AS r ON r.interaction_id = i.interaction_id
    AND r.choice_index = i.choice_index AND r.tenant = i.tenant
GROUP BY i.session_id, i.tenant
"""


def connect(
    store: DeltaStore,
    *,
    rewards: RewardsConfig,
    versions: Mapping[str, int] | None = None,
    as_of: datetime | None = None,
) -> duckdb.DuckDBPyConnection:
    """An in-memory DuckDB with every view of `VIEWS`.

    Args:
        store: A table that was not created yet reads as empty.
        rewards: How feedback becomes a reward.
        versions: Table versions to pin, e.g. from `DeltaStore.versions`. A table that is not named
            is pinned to its newest version now; all stay as they are while the connection lives.
        as_of: The time at which `rewards.maturity_s` is judged; now when absent.

    Raises:
        ServiceUnavailable: the storage does not answer, or a pinned version was cleaned away.
    """
    connection = duckdb.connect(":memory:")
    connection.execute("SET TimeZone = 'UTC'")
    for table in TABLES:
        _add_table(connection, store, table, version=(versions or {}).get(table))
    connection.execute(reward_view(rewards, as_of=as_of or datetime.now(UTC)))
    for view in (_SESSIONS_VIEW, PROMPT_PIECES_VIEW, PROMPTS_VIEW, SEGMENTS_VIEW):
        connection.execute(view)
    return connection


def _add_table(
    connection: duckdb.DuckDBPyConnection, store: DeltaStore, table: str, *, version: int | None
) -> None:
    if version is None and not store.exists(table):
        rows = schema_of(TABLES[table]).empty_table()
    else:
        rows = _with_every_column(store.dataset(table, version=version), table)
    connection.register(f"stored_{table}", rows)
    connection.execute(_deduplicated(table))


def _with_every_column(stored: Dataset, table: str) -> Dataset:
    """Columns in the order of the row model; one that an older table lacks reads as null."""
    present = {field.name: field for field in stored.schema}
    declared = schema_of(TABLES[table])
    fields = [present.pop(field.name, field.with_nullable(True)) for field in declared]
    return stored.replace_schema(pa.schema([*fields, *present.values()]))


def _deduplicated(table: str) -> str:
    identity, age = ", ".join(_IDENTITY[table]), _AGE[table]
    if table != "interactions":
        return f"""
CREATE VIEW {table} AS
SELECT * FROM stored_{table}
QUALIFY row_number() OVER (PARTITION BY {identity} ORDER BY {age}) = 1
"""
    # Repeats are rare and rows are wide: look for them in narrow columns, so that tokens are
    # streamed and never sorted.
    return f"""
CREATE VIEW interactions AS
SELECT t.* FROM stored_interactions AS t
LEFT JOIN (
    SELECT {identity}, min(({age})) AS kept
    FROM stored_interactions GROUP BY {identity} HAVING count(*) > 1
) AS repeated USING ({identity})
WHERE repeated.kept IS NULL OR repeated.kept = (t.ingested_at, t.partition, t."offset")
"""
