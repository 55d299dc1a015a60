"""Rows of an erased person that were stored after all, and their removal.

Ingest looks at the table `erased` before it stores a batch. One that was underway at that moment
may bring rows back; every pass of upkeep looks for such rows, as `ErasedSet` would judge them.
"""

import logging
from datetime import datetime, timedelta

import duckdb

from onlinerl.rollout_store.audit import record_act
from onlinerl.rollout_store.deletion import Position, delete_positions
from onlinerl.rollout_store.erased import TABLE, TIME_COLUMNS
from onlinerl.rollout_store.store import DeltaStore

logger = logging.getLogger(__name__)

_OVERLAP = timedelta(days=2)
"""Rows that were stored this long before the first erasure need no look: it saw them."""

_PARENTS = {"interactions": "parent_id"}
_FOUND = """
WITH bars AS (SELECT kind, digest, max(before_at) AS before_at FROM erased GROUP BY ALL),
named AS (
    SELECT ingest_date, topic, "partition", ingested_at, "offset", {at} AS happened_at,
        unnest([
            {{kind: 'user', name: "user"}},
            {{kind: 'session', name: session_id}},
            {{kind: 'interaction', name: interaction_id}},
            {{kind: 'interaction', name: {parent}}}
        ]) AS id, tenant
    FROM stored WHERE ingest_date >= $since
)
SELECT DISTINCT n.ingest_date, n.topic, n."partition", n.ingested_at, n."offset"
FROM named AS n JOIN bars AS b ON b.kind = n.id.kind
    AND b.digest = left(sha256(concat_ws(chr(31), n.id.kind, n.tenant, n.id.name)), 32)
WHERE n.id.name IS NOT NULL AND (b.kind = 'interaction' OR n.happened_at <= b.before_at)
"""


def remove_resurrected(store: DeltaStore, *, actor: str, at: datetime) -> int:
    """Delete them from the newest version; returns the number of rows.

    Their files leave the disk with the vacuum, `[maintenance].retention_hours` later, or at once
    when `onlinerl erase` is called again.
    """
    if not store.exists(TABLE):
        return 0
    total = 0
    for table, time_column in TIME_COLUMNS.items():
        found = _find(store, table, time_column)
        if not found:
            continue
        num_rows = delete_positions(store, table, found)
        logger.warning("rows of an erased person came back and were deleted: %d", num_rows)
        record_act(
            store,
            actor=actor,
            action="erase.resurrected",
            subject=table,
            detail={"num_rows": num_rows},
            at=at,
        )
        total += num_rows
    return total


def _find(store: DeltaStore, table: str, time_column: str) -> list[Position]:
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("erased", store.dataset(TABLE))
        ((first,),) = connection.execute("SELECT min(acted_at)::DATE FROM erased").fetchall()
        if first is None or not store.exists(table):
            return []
        connection.register("stored", store.dataset(table))
        rows = connection.sql(
            _FOUND.format(at=time_column, parent=_PARENTS.get(table, "NULL")),
            params={"since": first - _OVERLAP},
        ).to_arrow_table()
    return [Position(**row) for row in rows.to_pylist()]
