"""Rows of an erased person that were stored after all, and their removal.

Ingest looks at the table `erased` before it stores a batch. One that was underway at that moment
may bring rows back; every pass of upkeep looks for such rows, as `ErasedSet` would judge them.
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
"""Rows that were stored this long before the first erasure need no look: it saw them."""

_LETTERS = "dead_letters"
_POSITION = [field.name for field in fields(Position)]
_BATCH_ROWS = 256

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

    Snapshots that hold such rows are marked. The files leave the disk with the vacuum,
    `[maintenance].retention_hours` later, or at once when `onlinerl erase` is called again.
    """
    if not store.exists(TABLE):
        return 0
    total = 0
    for table in (*TIME_COLUMNS, _LETTERS):
        found = _find(store, table)
        if not found:
            continue
        _mark(store, table, actor=actor, at=at)
        num_rows = delete_positions(store, table, found)
        _mark(store, table, actor=actor, at=at)  # what was made since the first time
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
        if table == _LETTERS:
            return _find_letters(store, since=since, version=version)
        connection.register("stored", store.dataset(table, version=version))
        rows = connection.sql(
            _FOUND.format(at=TIME_COLUMNS[table], parent=_PARENTS.get(table, "NULL")),
            params={"since": since},
        ).to_arrow_table()
    return _positions(rows)


def _find_letters(store: DeltaStore, *, since: date, version: int | None) -> list[Position]:
    """Letters are judged one by one: only their text says whose they are."""
    erased = ErasedSet(store)
    erased.refresh()
    scanner = store.dataset(_LETTERS, version=version).scanner(
        columns=[*_POSITION, "payload"],
        filter=pc.field("ingest_date") >= since,
        batch_size=_BATCH_ROWS,
        batch_readahead=2,
        fragment_readahead=1,
    )
    found: list[Position] = []
    for batch in scanner.to_batches():
        letters = pa.Table.from_batches([batch])
        kept = set(_positions(erased.without(_LETTERS, letters)))
        found += [position for position in _positions(letters) if position not in kept]
    return found


def _positions(rows: pa.Table) -> list[Position]:
    return [Position(**row) for row in rows.select(_POSITION).to_pylist()]
