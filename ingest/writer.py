"""The commit path: a batch and the offsets it reaches, in one commit per table.

Order of one batch: dead letters first, with their own offsets; then rows, with the offsets that
reading goes on from. A crash between the two repeats the batch, and the dead letters below their
own stored offset are left out. Rows are last, so their offset is never ahead of anything.

Every commit also carries this writer's number. A writer takes the next number when it starts, which
makes any older one fail at its next commit: the newest of two writers goes on, the other is fenced.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import pyarrow as pa

from onlinerl.errors import StoreConflict
from onlinerl.ingest import metrics
from onlinerl.ingest.batch import ROUTES, Batch, Route, sort_records
from onlinerl.ingest.log import LogRecord, Partition
from onlinerl.ingest.recent import RecentIds, stored_ids
from onlinerl.rollout_store.kafka_topics import Topic
from onlinerl.rollout_store.rows import schema_of, to_table
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.store import DeltaStore, Transaction

logger = logging.getLogger(__name__)

DEAD_LETTERS = "dead_letters"
WRITER_APP_ID = "onlinerl/ingest/writer"
STEPS = ("before_commit", "after_dead_letters", "after_rows")
"""Points of one batch at which `fault` is called, in order."""

_CLAIM_ATTEMPTS = 20


def offset_app_id(topic: Topic, partition: int) -> str:
    """Under which a partition's next offset is stored; differs when a topic is created anew."""
    return f"onlinerl/{topic.name}/{topic.topic_id}/{partition}"


class TableWriter:
    """Writes batches exactly once: `CLAIMED -> ALIGNED <-> writing`, until fenced.

    `claim` once, then `align` whenever reading starts over, then `write` any number of times.
    After an error from `write`, `align` before writing again: the commit may have happened.

    Args:
        store: Where the tables lie; missing ones are created.
        recent_ids: How many ids per table repeats are recognised by.
        now: The time that rows are stamped with.
        fault: Called with each of `STEPS`; a test may end the process there.
    """

    def __init__(
        self,
        store: DeltaStore,
        *,
        recent_ids: int,
        now: Callable[[], datetime],
        fault: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._store = store
        self._capacity = recent_ids
        self._now = now
        self._fault = fault
        self._numbers: dict[str, int] = {}
        self._app_ids: dict[Partition, str] = {}
        self._stored: dict[tuple[str, Partition], int | None] = {}
        self._dead_from: dict[Partition, int] = {}
        self._recent: dict[str, RecentIds] = {}

    def claim(self) -> None:
        """Take the next writer number in every table; older writers fail from now on."""
        self._store.create()
        for table in (DEAD_LETTERS, *(route.table for route in ROUTES)):
            self._numbers[table] = self._claim_table(table)

    def align(self, topics: Mapping[str, Topic]) -> dict[Partition, int]:
        """Load what is stored for these topics; returns where to read on, 0 for a new topic."""
        self._app_ids = {
            (topic.name, number): offset_app_id(topic, number)
            for topic in topics.values()
            for number in topic.partitions
        }
        for table in (DEAD_LETTERS, *(route.table for route in ROUTES)):
            stored = self._store.transaction_versions(table, self._app_ids.values())
            for partition, app_id in self._app_ids.items():
                self._stored[table, partition] = stored[app_id]
        for route in ROUTES:
            self._recent[route.topic] = stored_ids(
                self._store, route.table, id_column=route.id_column, capacity=self._capacity
            )
        self._dead_from = {p: self._stored[DEAD_LETTERS, p] or 0 for p in self._app_ids}
        tables = {route.topic: route.table for route in ROUTES}
        return {p: self._stored[tables[p[0]], p] or 0 for p in self._app_ids}

    def restart(self, partition: Partition) -> None:
        """The stored offset is not in the log: what comes next may have lower offsets."""
        self._dead_from[partition] = 0

    def write(self, route: Route, records: Sequence[LogRecord]) -> None:
        """Store records of one topic that follow the last ones written.

        Raises:
            StoreConflict: a newer writer took over; stop.
            ServiceUnavailable: the storage failed; `align` and read again.
        """
        if not records:
            return
        batch = sort_records(
            route, records, recent=self._recent[route.topic], ingested_at=self._now()
        )
        self._fault("before_commit")
        with metrics.COMMIT_SECONDS.labels(route.topic).time():
            self._write_dead_letters(batch)
            self._fault("after_dead_letters")
            self._commit(route.table, batch.rows, batch.ends)
        self._fault("after_rows")
        self._recent[route.topic].add(batch.ids)
        _count(route, records, batch)

    def _write_dead_letters(self, batch: Batch) -> None:
        new = [row for row in batch.dead if row.offset >= self._dead_from[row.topic, row.partition]]
        if not new:
            return
        partitions = {(row.topic, row.partition) for row in new}
        ends = {p: end for p, end in batch.ends.items() if p in partitions}
        self._commit(DEAD_LETTERS, to_table(new), ends)
        self._dead_from.update(ends)
        metrics.DEAD_LETTERS.labels(new[0].topic).inc(len(new))
        logger.warning(
            "%d dead letters, the first at %s/%d offset %d: %s",
            len(new),
            new[0].topic,
            new[0].partition,
            new[0].offset,
            new[0].reason,
        )

    def _commit(self, table: str, rows: pa.Table, ends: Mapping[Partition, int]) -> None:
        number = self._numbers[table]
        transactions = [Transaction(app_id=WRITER_APP_ID, version=number, expected=number)]
        transactions += [
            Transaction(
                app_id=self._app_ids[partition],
                version=end,
                expected=self._stored[table, partition],
            )
            for partition, end in ends.items()
        ]
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
                continue  # the older writer committed in between, or another one starts too
            return number
        raise StoreConflict(f"could not take over table {table} in {_CLAIM_ATTEMPTS} attempts")


def _count(route: Route, records: Sequence[LogRecord], batch: Batch) -> None:
    metrics.RECORDS.labels(route.topic).inc(len(records))
    metrics.ROWS.labels(route.table).inc(batch.rows.num_rows)
    metrics.REPEATED.labels(route.topic).inc(batch.num_repeated)
    metrics.WITHHELD.labels(route.topic).inc(batch.num_withheld)
    metrics.UNTRAINABLE.inc(batch.num_untrainable)
    logger.debug(
        "batch committed",
        extra={"topic": route.topic, "records": len(records), "rows": batch.rows.num_rows},
    )
