"""Commits a batch and the offsets it reaches, in one commit per table.

A batch is written in two commits: first its dead letters, with offsets of their own; then its rows,
with the offsets from which reading goes on. After a crash between the two, the batch is read again
and the dead letters below their own stored offset are left out. Rows come last, so their offset is
never ahead of the dead letters.

A commit replaces the offsets that the writer read from the table, and fails when another process
has replaced them meanwhile: then it stores nothing. Commits of an exclusive writer also carry the
writer's number. A writer takes the next number when it starts, so every older writer fails at its
next commit (it is fenced).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from onlinerl.errors import StoreConflict
from onlinerl.ingest import metrics
from onlinerl.ingest.batches.recent import RecentEvents, stored_events
from onlinerl.ingest.batches.sorting import ROUTES, Batch, Route, sort_records
from onlinerl.ingest.committing.buffer import size_of
from onlinerl.ingest.event_log.log import LogRecord, Partition
from onlinerl.rollout_store.event_log import Topic, TopicIdPartition
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.rows import schema_of, to_table

logger = logging.getLogger(__name__)

DEAD_LETTERS = "dead_letters"
WRITER_APP_ID = "onlinerl/ingest/writer"
STEPS = ("before_commit", "after_dead_letters", "after_rows")
"""The points of a batch at which `fault` is called, in order."""

Screen = Callable[[str, pa.Table], pa.Table]
"""Filters rows before they are stored: `(table, rows) -> rows`, some of them masked or left out."""

_CLAIM_ATTEMPTS = 20


class TableWriter:
    """Writes batches exactly once: `CLAIMED -> ALIGNED <-> writing`, until fenced.

    Call `claim` once, `align` whenever reading starts over, and then `write` any number of times.
    After an error from `write`, call `align` before writing again: the commit may have happened.

    Args:
        store: Holds the tables; missing ones are created.
        recent_ids: Number of events per table by which repeats are recognised.
        now: The time for `ingested_at`. If it goes back, the last time is used again.
        exclusive: True fences every older writer; False shares the partitions with others.
        vocab_size: Token ids are below it; 0 when it is not known.
        screen: Filters the rows of each batch, dead letters included.
        fault: Called with each of `STEPS`, so that a test can kill the process there.
    """

    def __init__(
        self,
        store: DeltaStore,
        *,
        recent_ids: int,
        now: Callable[[], datetime],
        exclusive: bool = True,
        vocab_size: int = 0,
        screen: Screen = lambda table, rows: rows,
        fault: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._store = store
        self._recent_ids = recent_ids
        self._now = now
        self._exclusive = exclusive
        self._vocab_size = vocab_size
        self._screen = screen
        self._fault = fault
        self._stamped_at: datetime | None = None
        self._numbers: dict[str, int] = {}
        self._app_ids: dict[Partition, str] = {}
        self._stored: dict[tuple[str, Partition], int | None] = {}
        self._dead_letters_from: dict[Partition, int] = {}
        self._recent: dict[str, RecentEvents] = {}
        self.num_records = 0
        """Number of records committed, including dead letters and repeats."""

    def claim(self) -> None:
        """Create missing tables; when exclusive, make older writers fail from now on.

        Raises:
            StoreConflict: Other writers kept claiming the tables.
            ServiceUnavailable: The storage failed.
        """
        self._store.create()
        if self._exclusive:
            for table in (DEAD_LETTERS, *(route.table for route in ROUTES)):
                self._numbers[table] = self._claim_table(table)

    def align(
        self, topics: Mapping[str, Topic], partitions: Iterable[Partition]
    ) -> dict[Partition, int]:
        """Load what is stored of these partitions.

        Returns:
            The offset from which to read each partition; 0 for a new topic.

        Raises:
            ServiceUnavailable: The storage failed.
        """
        self._app_ids = {
            (name, number): TopicIdPartition(name, topics[name].topic_id, number).app_id
            for name, number in partitions
        }
        for table in (DEAD_LETTERS, *(route.table for route in ROUTES)):
            stored = self._store.transaction_versions(table, self._app_ids.values())
            for partition, app_id in self._app_ids.items():
                self._stored[table, partition] = stored[app_id]
        for route in ROUTES:
            self._recent[route.topic] = stored_events(
                self._store,
                route.table,
                id_column=route.id_column,
                capacity=self._recent_ids,
                with_lengths=route.table == "interactions",
            )
        self._dead_letters_from = {p: self._stored[DEAD_LETTERS, p] or 0 for p in self._app_ids}
        tables = {route.topic: route.table for route in ROUTES}
        return {p: self._stored[tables[p[0]], p] or 0 for p in self._app_ids}

    def restart(self, partitions: Iterable[Partition]) -> None:
        """Reset the dead-letter offsets of partitions whose stored offset is not in the log.

        The records that come next may have lower offsets. The reset offset is committed
        immediately. Otherwise a later process would see broken records below the old offset and
        wrongly assume that their dead letters are already stored.

        Raises:
            StoreConflict: Another writer stored records of these partitions, or took over.
            ServiceUnavailable: The storage failed; call `align` and read again.
        """
        starts = {partition: 0 for partition in partitions if self._dead_letters_from[partition]}
        if starts:
            self._commit(DEAD_LETTERS, schema_of(TABLES[DEAD_LETTERS]).empty_table(), starts)
            self._dead_letters_from.update(starts)

    def write(self, route: Route, records: Sequence[LogRecord]) -> None:
        """Store records of one topic; they follow the last ones written.

        Raises:
            StoreConflict: Another writer stored records of these partitions, or took over.
            ServiceUnavailable: The storage failed; call `align` and read again.
        """
        if not records:
            return
        with metrics.SORT_SECONDS.labels(route.topic).time():
            batch = sort_records(
                route,
                records,
                recent=self._recent[route.topic],
                ingested_at=self._stamp(),
                vocab_size=self._vocab_size,
            )
            rows = self._screen(route.table, batch.rows)
        self._fault("before_commit")
        with metrics.COMMIT_SECONDS.labels(route.topic).time():
            self._write_dead_letters(route, batch)
            self._fault("after_dead_letters")
            self._commit(route.table, rows, batch.ends)
        self._fault("after_rows")
        self._recent[route.topic].add(batch.events)
        self.num_records += len(records)
        _count(route, records, batch, rows)

    def _stamp(self) -> datetime:
        """Now, but never before the last stamp, so that the rows of one process stay in order."""
        self._stamped_at = max(self._now(), self._stamped_at or self._now())
        return self._stamped_at

    def _write_dead_letters(self, route: Route, batch: Batch) -> None:
        new = [
            row
            for row in batch.dead
            if row.offset >= self._dead_letters_from[row.topic, row.partition]
        ]
        if not new:
            return
        partitions = {(row.topic, row.partition) for row in new}
        ends = {p: end for p, end in batch.ends.items() if p in partitions}
        self._commit(DEAD_LETTERS, self._screen(DEAD_LETTERS, to_table(new)), ends)
        self._dead_letters_from.update(ends)
        for kind, count in batch.dead_by_kind.items():
            metrics.DEAD_LETTERS.labels(route.topic, kind).inc(count)
        logger.warning(
            "%d dead letters, the first at %s/%d offset %d: %s",
            len(new),
            new[0].topic,
            new[0].partition,
            new[0].offset,
            new[0].reason,
        )

    def _commit(self, table: str, rows: pa.Table, ends: Mapping[Partition, int]) -> None:
        transactions = [
            Transaction(
                app_id=self._app_ids[partition],
                version=end,
                expected=self._stored[table, partition],
            )
            for partition, end in ends.items()
        ]
        if self._exclusive:
            number = self._numbers[table]
            transactions.append(Transaction(app_id=WRITER_APP_ID, version=number, expected=number))
        self._store.append(table, rows, transactions=transactions)
        for partition, end in ends.items():
            self._stored[table, partition] = end

    def _claim_table(self, table: str) -> int:
        empty = schema_of(TABLES[table]).empty_table()
        for _ in range(_CLAIM_ATTEMPTS):
            stored = self._store.transaction_version(table, WRITER_APP_ID)
            number = (stored or 0) + 1
            claim = Transaction(app_id=WRITER_APP_ID, version=number, expected=stored)
            try:
                self._store.append(table, empty, transactions=[claim])
            except StoreConflict:
                continue  # the older writer committed in between, or a third one starts too
            return number
        raise StoreConflict(f"could not take over table {table} in {_CLAIM_ATTEMPTS} attempts")


def _count(route: Route, records: Sequence[LogRecord], batch: Batch, rows: pa.Table) -> None:
    size_bytes = size_of(records)
    metrics.RECORDS.labels(route.topic).inc(len(records))
    metrics.RECORD_BYTES.labels(route.topic).inc(size_bytes)
    metrics.BATCH_RECORDS.labels(route.topic).observe(len(records))
    metrics.BATCH_BYTES.labels(route.topic).observe(size_bytes)
    metrics.COMMITS.labels(route.topic).inc()
    metrics.ROWS.labels(route.table).inc(rows.num_rows)
    metrics.REPEATED.labels(route.topic).inc(batch.num_repeated)
    metrics.WITHHELD.labels(route.topic).inc(batch.num_withheld)
    if "trainable" in rows.column_names:
        metrics.UNTRAINABLE.inc(rows.num_rows - (pc.sum(rows["trainable"]).as_py() or 0))
    logger.debug(
        "batch committed",
        extra={"topic": route.topic, "records": len(records), "rows": rows.num_rows},
    )
