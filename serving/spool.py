"""The bounded disk queue between requests and the event log.

Nobody waits for a disk here: `put` leaves a record in memory, a thread writes it.
"""

import fcntl
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, cast

from onlinerl.errors import LeaseHeld, SpoolFull
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.cursor import Cursor, load_cursor, store_cursor
from onlinerl.serving.events import Record
from onlinerl.serving.metrics import GatewayMetrics
from onlinerl.serving.segments import (
    Position,
    Stored,
    pack,
    read_segment,
    segment_numbers,
    segment_path,
)

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
"""After a failed write."""
_WAKE_S = 60.0
"""How often a quiet spool looks whether its segment is old."""
_WRITE_BYTES = 4 * 2**20
"""Written at once, so that a segment does not grow far over its size."""
_OnStored = Callable[[], None] | None


class Spool:
    """Records on their way to the log.

    QUEUED (memory, `put`) -> STORED (segment file, writer thread; a killed process loses nothing)
    -> SHIPPED (`ack`, shipper thread) -> DROPPED (`retain_bytes` or `retain_s` exceeded).

    QUEUED is bounded by `queue_events` and `queue_bytes`, QUEUED and STORED together by
    `max_bytes`. Safe to use from any thread; one process per folder.

    Raises:
        LeaseHeld: when another process uses the folder.
    """

    def __init__(self, folder: Path, config: SpoolConfig, *, metrics: GatewayMetrics) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._config = config
        self._metrics = metrics
        self._lock_file = _lock(folder)
        self._changed = threading.Condition()
        self._queue: deque[tuple[bytes, _OnStored]] = deque()
        self._queued_bytes = 0
        self._closing = False
        numbers = segment_numbers(folder)
        self._sizes = {n: segment_path(folder, n).stat().st_size for n in numbers}
        self._next_segment = max(numbers, default=0) + 1
        self._file: BinaryIO | None = None
        self._opened_at = 0.0
        self._synced_at = time.monotonic()
        self._unsynced = False
        self._cursor = self._valid(load_cursor(folder, default=self._oldest()))
        self._read_position = self._cursor.position
        self._torn: dict[Position, Position] = {}
        metrics.backlog_bytes.set_function(lambda: float(self.backlog_bytes))
        self._writer = threading.Thread(target=self._write_forever, name="spool", daemon=True)
        self._writer.start()

    @property
    def backlog_bytes(self) -> int:
        """Bytes on disk that are not shipped."""
        with self._changed:
            return self._backlog()

    @property
    def topic_ids(self) -> dict[str, str]:
        """The incarnations of the topics that took what is shipped."""
        with self._changed:
            return dict(self._cursor.topic_ids)

    @property
    def is_drained(self) -> bool:
        """Whether everything that was put is shipped."""
        with self._changed:
            return not self._queue and self._backlog() == 0

    def put(self, record: Record, *, on_stored: _OnStored = None) -> None:
        """Queue a record; never waits for a disk.

        Raises:
            SpoolFull: at a bound, for a record over `max_event_bytes`, or after `close`.
        """
        data = pack(record)
        with self._changed:
            self._check_room(len(data))
            self._queue.append((data, on_stored))
            self._queued_bytes += len(data)
            self._changed.notify_all()

    def read(self, *, max_records: int, max_bytes: int, timeout_s: float) -> list[Stored]:
        """The records after those that were read before; waits for the first, up to `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._backlog_after_read() or self._closing, timeout_s)
        batch: list[Stored] = []
        size = 0
        while len(batch) < max_records and size < max_bytes:
            found = self._read_some(
                max_records=max_records - len(batch), max_bytes=max_bytes - size
            )
            if not found:
                break
            batch += found
            size += sum(len(stored.record.value) for stored in found)
        return batch

    def ack(self, position: Position, *, topic_ids: Mapping[str, str]) -> None:
        """The log took everything before `position`. Durable when it returns."""
        self._move(Cursor(position, dict(topic_ids)))
        self.prune()

    def reread(self) -> None:
        """Read again what was read and not acknowledged."""
        with self._changed:
            self._read_position = self._cursor.position

    def rewind(self, *, topic_ids: Mapping[str, str]) -> None:
        """The log came back empty: everything that is kept is to be shipped again."""
        with self._changed:
            oldest = self._oldest()
        self._move(Cursor(oldest, dict(topic_ids)))
        self.reread()

    def prune(self) -> None:
        """Drop shipped segments over `retain_bytes` or older than `retain_s`."""
        with self._changed:
            shipped = self._shipped()
        ages = {number: _age_s(segment_path(self._folder, number)) for number in shipped}
        with self._changed:
            victims = self._take_victims(ages)
        for number in victims:
            segment_path(self._folder, number).unlink(missing_ok=True)

    def close(self, *, timeout_s: float) -> None:
        """Store what is queued and let the folder go."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join(timeout_s)
        self._lock_file.close()

    def _check_room(self, size: int) -> None:
        config = self._config
        if self._closing:
            raise SpoolFull("the spool is closed")
        if size > config.max_event_bytes:
            raise SpoolFull(f"an event of {size} bytes exceeds max_event_bytes")
        if len(self._queue) >= config.queue_events:
            raise SpoolFull(f"{config.queue_events} events wait for the disk (queue_events)")
        if self._queued_bytes + size > config.queue_bytes:
            raise SpoolFull(f"{self._queued_bytes} bytes wait for the disk (queue_bytes)")
        if self._backlog() + self._queued_bytes + size > config.max_bytes:
            raise SpoolFull(f"{self._backlog()} bytes wait for the event log (max_bytes)")

    def _backlog(self) -> int:
        return self._bytes_after(self._cursor.position)

    def _backlog_after_read(self) -> int:
        return self._bytes_after(self._read_position)

    def _bytes_after(self, position: Position) -> int:
        total = sum(size for n, size in self._sizes.items() if n >= position.segment)
        return total - (position.offset if position.segment in self._sizes else 0)

    def _oldest(self) -> Position:
        return Position(min(self._sizes, default=self._next_segment), 0)

    def _valid(self, cursor: Cursor) -> Cursor:
        """A cursor whose segment still exists."""
        position = cursor.position
        if position.segment in self._sizes:
            return cursor
        later = [n for n in self._sizes if n > position.segment]
        return Cursor(Position(min(later, default=self._next_segment), 0), cursor.topic_ids)

    def _move(self, cursor: Cursor) -> None:
        end = self._torn.get(cursor.position, cursor.position)
        cursor = Cursor(end, cursor.topic_ids)
        store_cursor(self._folder, cursor)
        with self._changed:
            self._cursor = cursor

    def _read_some(self, *, max_records: int, max_bytes: int) -> list[Stored]:
        """Records of one segment; steps to the next segment when this one is exhausted."""
        with self._changed:
            start = self._read_position
            numbers = sorted(n for n in self._sizes if n >= start.segment)
            if not numbers:
                return []
            if numbers[0] != start.segment:
                start = Position(numbers[0], 0)
            end = self._sizes[start.segment]
        batch: list[Stored] = []
        size = 0
        for stored in read_segment(self._folder, start, end=end):
            batch.append(stored)
            size += len(stored.record.value)
            if len(batch) >= max_records or size >= max_bytes:
                break
        if batch:
            with self._changed:
                self._read_position = batch[-1].end
            return batch
        if start.offset < end:
            self._skip_torn(start, Position(start.segment, end))
        if len(numbers) == 1:
            return []
        with self._changed:
            self._read_position = Position(numbers[1], 0)
        return self._read_some(max_records=max_records, max_bytes=max_bytes)

    def _skip_torn(self, start: Position, end: Position) -> None:
        """What cannot be read is no backlog, or reading would try it for ever."""
        with self._changed:
            self._torn[start] = end
            self._read_position = end
            if self._cursor.position == start:
                self._cursor = Cursor(end, self._cursor.topic_ids)

    def _shipped(self) -> list[int]:
        return [number for number in sorted(self._sizes) if self._is_shipped(number)]

    def _take_victims(self, ages: Mapping[int, float]) -> list[int]:
        """The segments to drop, of those whose age is known; they are forgotten at once."""
        shipped = self._shipped()
        kept = sum(self._sizes[number] for number in shipped)
        victims: list[int] = []
        for number in shipped:
            young = number not in ages or ages[number] <= self._config.retain_s
            if kept <= self._config.retain_bytes and young:
                break
            kept -= self._sizes.pop(number)
            victims.append(number)
        return victims

    def _is_shipped(self, number: int) -> bool:
        position = self._cursor.position
        if number != position.segment:
            return number < position.segment
        is_open = self._file is not None and number == self._next_segment - 1
        return not is_open and position.offset >= self._sizes[number]

    def _write_forever(self) -> None:
        while True:
            wait_s = self._config.fsync_s if self._unsynced else _WAKE_S
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing, wait_s)
                batch, closing = self._next_batch(), self._closing
            try:
                self._write(batch)
                self._sync(force=closing)
            except OSError:
                # The batch stays queued; when the queue is full `put` says so.
                logger.exception("the spool cannot be written")
                if closing:
                    self._next_file()
                    return
                time.sleep(_RETRY_S)
                continue
            if closing and not batch:
                self._next_file()
                return

    def _next_batch(self) -> list[tuple[bytes, _OnStored]]:
        batch: list[tuple[bytes, _OnStored]] = []
        size = 0
        for item in self._queue:
            batch.append(item)
            size += len(item[0])
            if size >= _WRITE_BYTES:
                break
        return batch

    def _write(self, batch: list[tuple[bytes, _OnStored]]) -> None:
        self._end_full_segment()
        if not batch:
            return
        file, number = self._open_segment()
        data = b"".join(piece for piece, _ in batch)
        try:
            _write_all(file, data)
        except OSError:
            self._undo_write(file, size=self._sizes[number])
            raise
        self._unsynced = True
        with self._changed:
            self._sizes[number] += len(data)
            for _ in batch:
                self._queue.popleft()
            self._queued_bytes -= len(data)
            self._changed.notify_all()
        self._metrics.spooled.inc(len(batch))
        for _, on_stored in batch:
            _call(on_stored)

    def _undo_write(self, file: BinaryIO, *, size: int) -> None:
        """Cut off what a failed write left, or every try would leak it."""
        try:
            file.seek(size)
            file.truncate()
        except OSError:
            logger.exception("a torn record cannot be cut off")
            self._next_file()

    def _end_full_segment(self) -> None:
        size = self._sizes.get(self._next_segment - 1, 0)
        # Segments also end by age, or a quiet gateway would keep old events for ever.
        age_s = time.monotonic() - self._opened_at
        if size >= self._config.segment_bytes or age_s > max(self._config.retain_s / 4, _WAKE_S):
            self._next_file()

    def _open_segment(self) -> tuple[BinaryIO, int]:
        if self._file is None:
            path = segment_path(self._folder, self._next_segment)
            file = cast(BinaryIO, path.open("xb", buffering=0))
            self._opened_at = time.monotonic()
            with self._changed:
                # Known from its first byte on, or a rewind could miss what is being written.
                self._file = file
                self._sizes[self._next_segment] = 0
                self._next_segment += 1
        return self._file, self._next_segment - 1

    def _next_file(self) -> None:
        if self._file is not None:
            try:
                _fsync(self._file)
                self._file.close()
            except OSError:
                logger.exception("a spool segment cannot be closed")
            self._file = None

    def _sync(self, *, force: bool) -> None:
        due = time.monotonic() - self._synced_at >= self._config.fsync_s
        if self._file is not None and self._unsynced and (due or force):
            try:
                _fsync(self._file)
            except OSError:
                self._next_file()  # nothing may follow pages that the disk did not take
                raise
            self._synced_at = time.monotonic()
            self._unsynced = False


def _write_all(file: BinaryIO, data: bytes) -> None:
    """Unbuffered files may take less than they are given."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _age_s(path: Path) -> float:
    """Since the last write; endless for a file that somebody deleted."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _call(on_stored: _OnStored) -> None:
    try:
        if on_stored is not None:
            on_stored()
    except Exception:
        logger.exception("a record was stored and nobody could be told")


def _fsync(file: BinaryIO) -> None:
    os.fsync(file.fileno())


def _lock(folder: Path) -> BinaryIO:
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise LeaseHeld(f"another gateway uses the spool {folder}") from error
    return file
