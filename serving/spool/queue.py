"""The bounded disk queue between requests and the event log.

Requests never wait for the disk: `put` queues a record in memory, the thread of `SpoolWriter`
stores it, and the shipper reads it back.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from onlinerl.rollout_store.event_log import TopicIdPartition
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import EventSink, Record
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool.cursor import load_cursor, store_cursor
from onlinerl.serving.spool.forgetting import (
    Person,
    answer_request,
    forget_in_segment,
    read_requests,
)
from onlinerl.serving.spool.segment_files import (
    Position,
    Stored,
    count_records,
    lock_folder,
    read_segment,
    remove_temporary_files,
    segment_numbers,
    segment_path,
)
from onlinerl.serving.spool.segment_index import SegmentIndex, choose_evictions
from onlinerl.serving.spool.writer import SpoolWriter

logger = logging.getLogger(__name__)

_ROLL_S = 5.0
"""Seconds for the writer to store what is queued before a user is forgotten."""


class Spool(EventSink):
    """Records on their way to the log.

    QUEUED (memory, `put`) -> STORED (segment file, writer thread; a killed process loses nothing)
    -> SHIPPED (`ack`, shipper thread) -> DROPPED (the tables hold it, `retain_bytes` or `retain_s`
    is exceeded, or the disk is full).

    It is bounded by `queue_events`, `queue_bytes` and `max_bytes`. Any thread may call `put` and
    `confirm`; only the shipper's thread may call the other methods that change something. Only one
    process may use a folder.

    Raises:
        LeaseHeld: when another process uses the folder.
    """

    def __init__(self, folder: Path, config: SpoolConfig, *, metrics: GatewayMetrics) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._config = config
        self._metrics = metrics
        self._lock_file = lock_folder(folder)
        remove_temporary_files(folder)
        self._changed = threading.Condition()
        sizes = {n: segment_path(folder, n).stat().st_size for n in segment_numbers(folder)}
        self._index = SegmentIndex(sizes, load_cursor(folder))
        self._stored: Mapping[TopicIdPartition, int] = {}
        self._warned_requests: set[str] = set()
        """Requests to forget a user that cannot be read and that a warning was logged for."""
        # Negative by the records on disk at the start, so that shipping them counts up to zero.
        self._num_shipped = -self._count_waiting()
        self._writer = SpoolWriter(
            folder,
            config,
            index=self._index,
            changed=self._changed,
            make_room=self._make_room,
            metrics=metrics,
        )
        metrics.spool.backlog_bytes.set_function(lambda: float(self.backlog_bytes))
        metrics.spool.waiting.set_function(lambda: float(self.num_waiting))

    @property
    def backlog_bytes(self) -> int:
        """Bytes on disk that are not shipped."""
        with self._changed:
            return self._index.backlog_bytes

    @property
    def num_waiting(self) -> int:
        """Events in memory and on disk that are not shipped."""
        with self._changed:
            # A torn tail was counted as stored and is never shipped.
            on_disk = self._writer.num_stored - self._num_shipped
            return self._writer.num_queued + (on_disk if self._index.backlog_bytes else 0)

    @property
    def topic_ids(self) -> dict[str, str]:
        """The ids of the topics that took the shipped records."""
        with self._changed:
            return dict(self._index.cursor.topic_ids)

    @property
    def is_drained(self) -> bool:
        """Whether every record that was put is shipped."""
        with self._changed:
            return self._writer.num_queued == 0 and self._index.backlog_bytes == 0

    @property
    def fault(self) -> str | None:
        """Why the disk takes no records; None while it does."""
        return self._writer.fault

    @override
    def put(self, record: Record, *, on_stored: Callable[[], None] | None = None) -> None:
        self._writer.put(record, on_stored=on_stored)

    def read(self, *, max_records: int, max_bytes: int, timeout_s: float) -> list[Stored]:
        """Read the next records; wait up to `timeout_s` seconds for the first."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._index.unread_bytes or self._writer.is_closing, timeout_s
            )
        batch: list[Stored] = []
        size = 0
        while len(batch) < max_records and size < max_bytes:
            records = self._read_some(
                max_records=max_records - len(batch), max_bytes=max_bytes - size
            )
            if not records:
                break
            batch += records
            size += sum(len(stored.record.value) for stored in records)
        return batch

    def ack(
        self,
        batch: Sequence[Stored],
        *,
        topic_ids: Mapping[str, str],
        ends: Mapping[TopicIdPartition, int],
    ) -> None:
        """Note that the log took a batch; batches are acknowledged in the order of reading.

        Args:
            batch: What `read` returned.
            topic_ids: Ids of the topics that took it.
            ends: Offsets after the last record of the batch, by partition.
        """
        with self._changed:
            self._index.ship(batch[-1].end, topic_ids=topic_ids, ends=ends)
            self._num_shipped += len(batch)
        self._store_cursor()
        self.prune()

    def reread(self) -> None:
        """Go back to the first record that was not acknowledged."""
        with self._changed:
            self._index.read_position = self._index.cursor.position

    def rewind(self, *, topic_ids: Mapping[str, str]) -> None:
        """Ship all records on disk again, because the log lost its data."""
        with self._changed:
            self._index.rewind(topic_ids=topic_ids)
            num_stored = self._writer.num_stored
        self._num_shipped = num_stored - self._count_waiting()
        self._store_cursor()

    def shipped_to(self) -> set[TopicIdPartition]:
        """The partitions that hold shipped records which are still kept here."""
        with self._changed:
            return self._index.partitions()

    def confirm(self, stored: Mapping[TopicIdPartition, int]) -> None:
        """Note that the tables hold every record before these offsets, which need not be kept."""
        with self._changed:
            self._stored = dict(stored)

    def prune(self) -> None:
        """Delete shipped segments that the tables hold, or that exceed the bounds of retention."""
        with self._changed:
            confirmed = self._index.confirmed(self._stored)
        self._delete(confirmed, reason="confirmed")
        self._drop(
            retain_bytes=self._config.retain_bytes, retain_s=self._config.retain_s, reason="bound"
        )

    def handle_forget_requests(self) -> None:
        """Remove the users that `forget_user` asks for; after a failure the request stays."""
        try:
            for person, token in read_requests(self._folder, warned=self._warned_requests):
                num_records = self.forget(person)
                answer_request(self._folder, person.user_hash, token=token, num_records=num_records)
                logger.info("a user was taken out of the spool", extra={"num_events": num_records})
        except OSError:
            logger.exception("a user could not be taken out of the spool yet")

    def forget(self, person: Person) -> int:
        """Remove every event of a user, waiting or kept, and return how many there were.

        Raises:
            OSError: when the disk does not take the rewritten segments; try again.
        """
        if not self._writer.roll(timeout_s=_ROLL_S):
            raise OSError("the spool could not store what is queued in time")
        self.reread()
        with self._changed:
            closed = self._index.closed
        num_forgotten = sum(
            self._forget_in(number, size, person=person) for number, size in closed.items()
        )
        self._metrics.spool.forgotten.inc(num_forgotten)
        return num_forgotten

    def close(self, *, timeout_s: float) -> None:
        """Store what is queued and unlock the folder; what the disk does not take is lost."""
        self._writer.close(timeout_s=timeout_s)
        self._lock_file.close()

    def _store_cursor(self) -> None:
        with self._changed:
            cursor = self._index.cursor
        try:
            store_cursor(self._folder, cursor)
        except OSError:
            # After a crash some events are shipped twice, which ingest detects by their ids.
            self._metrics.spool.write_failures.inc()
            logger.exception("the spool's cursor cannot be written")

    def _count_waiting(self) -> int:
        """Records on disk after the cursor."""
        with self._changed:
            places = self._index.after_cursor()
        return sum(count_records(self._folder, start, end=end) for start, end in places)

    def _read_some(self, *, max_records: int, max_bytes: int) -> list[Stored]:
        """Read records of one segment; none when everything is read."""
        while True:
            with self._changed:
                unread = self._index.unread()
            if unread is None:
                return []
            start, end = unread
            batch: list[Stored] = []
            size = 0
            for stored in read_segment(self._folder, start, end=end):
                batch.append(stored)
                size += len(stored.record.value)
                if len(batch) >= max_records or size >= max_bytes:
                    break
            with self._changed:
                if batch:
                    self._index.read_position = batch[-1].end
                    return batch
                # A torn record is skipped, or every read would stop at it.
                self._index.skip_torn(start, Position(start.segment, end))

    def _forget_in(self, number: int, size: int, *, person: Person) -> int:
        with self._changed:
            cursor = self._index.cursor
        segment = forget_in_segment(self._folder, number, end=size, person=person, cursor=cursor)
        if segment is None:
            return 0
        with self._changed:
            self._index.resize(number, segment.size, cursor=segment.cursor)
            self._num_shipped += segment.num_waiting
        return segment.num_records

    def _make_room(self) -> None:
        """Delete shipped segments on a full disk, because new events are worth more."""
        freed = self._drop(retain_bytes=-1, retain_s=0, reason="disk_full")
        if freed:
            logger.warning("shipped events are dropped for new ones", extra={"bytes": freed})

    def _drop(self, *, retain_bytes: int, retain_s: float, reason: str) -> int:
        """Delete shipped segments over these bounds, and return how many bytes they had."""
        with self._changed:
            shipped = self._index.shipped()
        # Without the lock, because looking at files may take long.
        ages_s = {number: _age_s(segment_path(self._folder, number)) for number in shipped}
        numbers = choose_evictions(shipped, ages_s, retain_bytes=retain_bytes, retain_s=retain_s)
        return sum(shipped[number] for number in self._delete(numbers, reason=reason))

    def _delete(self, numbers: Collection[int], *, reason: str) -> list[int]:
        """Delete segments and return those that are gone; one that cannot be deleted stays."""
        deleted: list[int] = []
        for number in numbers:
            try:
                segment_path(self._folder, number).unlink(missing_ok=True)
            except OSError:
                # The disk is read-only, or full, where deleting takes space as well.
                self._metrics.spool.write_failures.inc()
                logger.exception("a shipped segment cannot be deleted")
                continue
            with self._changed:
                self._index.remove(number)
            self._metrics.spool.dropped_segments.labels(reason).inc()
            deleted.append(number)
        return deleted


def _age_s(path: Path) -> float:
    """Seconds since the last write; infinite for a deleted file, 0 when it cannot be looked up."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    except OSError:
        return 0.0
