"""Deletes rows of an erased person that were stored after the erasure.

Ingest reads the table `erased` before it stores a batch. A batch that was under way at that moment
may bring rows back, so every pass of upkeep searches for rows that `ErasedSet` would leave out.
"""

import logging
from dataclasses import fields
from datetime import date, datetime, timedelta

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from onlinerl.rollout_store.erasure.erased import TABLE, TIME_COLUMNS, ErasedSet
from onlinerl.rollout_store.snapshots.named import mark_where
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.deletion import Position, delete_positions
from onlinerl.rollout_store.tables.delta_store import DeltaStore

logger = logging.getLogger(__name__)

_OVERLAP = timedelta(days=2)
"""Only rows stored since this long before the first erasure are searched: it saw the older ones."""

_DEAD_LETTERS = "dead_letters"
_POSITION = [field.name for field in fields(Position)]
_BATCH_ROWS = 256

_PARENTS = {"interactions": "parent_id"}
_RESURRECTED = """
WITH exclusions AS (SELECT kind, digest, max(before_at) AS before_at FROM erased GROUP BY ALL),
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
FROM named AS n JOIN exclusions AS e ON e.kind = n.id.kind
    AND e.digest = left(sha256(concat_ws(chr(31), n.id.kind, n.tenant, n.id.name)), 32)
WHERE n.id.name IS NOT NULL AND (e.kind = 'interaction' OR n.happened_at <= e.before_at)
"""


def remove_resurrected(store: DeltaStore, *, actor: str, at: datetime) -> int:
    """Delete such rows from the newest version; returns the number of rows.

    Snapshots that hold such rows are marked. The vacuum removes the files
    `[maintenance].retention_hours` later; another `onlinerl erase` removes them immediately.
    """
    if not store.exists(TABLE):
        return 0
    total = 0
    for table in (*TIME_COLUMNS, _DEAD_LETTERS):
        positions = _find(store, table)
        if not positions:
            continue
        _mark(store, table, actor=actor, at=at)
        num_rows = delete_positions(store, table, positions)
        _mark(store, table, actor=actor, at=at)  # snapshots that were made meanwhile
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


def _mark(store: DeltaStore, table: str, *, actor: str, at: datetime) -> None:
    mark_where(
        store,
        table,
        lambda version: bool(_find(store, table, version=version)),
        actor=actor,
        reason="rows in it were of an erased person",
        at=at,
    )


def _find(store: DeltaStore, table: str, *, version: int | None = None) -> list[Position]:
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("erased", store.dataset(TABLE))
        ((first,),) = connection.execute("SELECT min(acted_at)::DATE FROM erased").fetchall()
        if first is None or not store.exists(table):
            return []
        since = first - _OVERLAP
        if table == _DEAD_LETTERS:
            return _find_dead_letters(store, since=since, version=version)
        connection.register("stored", store.dataset(table, version=version))
        rows = connection.sql(
            _RESURRECTED.format(at=TIME_COLUMNS[table], parent=_PARENTS.get(table, "NULL")),
            params={"since": since},
        ).to_arrow_table()
    return _positions(rows)


def _find_dead_letters(store: DeltaStore, *, since: date, version: int | None) -> list[Position]:
    """Dead letters are checked one by one, because only their payload tells whose they are."""
    erased = ErasedSet(store)
    erased.refresh()
    scanner = store.dataset(_DEAD_LETTERS, version=version).scanner(
        columns=[*_POSITION, "payload"],
        filter=pc.field("ingest_date") >= since,
        batch_size=_BATCH_ROWS,
        batch_readahead=2,
        fragment_readahead=1,
    )
    positions: list[Position] = []
    for batch in scanner.to_batches():
        rows = pa.Table.from_batches([batch])
        allowed = set(_positions(erased.without(_DEAD_LETTERS, rows)))
        positions += [position for position in _positions(rows) if position not in allowed]
    return positions


def _positions(rows: pa.Table) -> list[Position]:
    return [Position(**row) for row in rows.select(_POSITION).to_pylist()]
