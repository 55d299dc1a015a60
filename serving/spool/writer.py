"""The thread that writes the spool's records from memory to segment files."""

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from onlinerl.errors import SpoolFull
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool.appender import Appender
from onlinerl.serving.spool.segment_files import pack
from onlinerl.serving.spool.segment_index import SegmentIndex

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
"""Seconds between a failed write and the next attempt."""
_WAKE_S = 60.0
"""Seconds between two checks whether the open segment of a quiet spool is old."""
_WRITE_BYTES = 4 * 2**20
"""Bytes per write, so that a segment does not grow far beyond its size."""
_OnStored = Callable[[], None] | None


class SpoolWriter:
    """QUEUED (`put`, any thread) -> STORED (the thread here), in order and without gaps.

    QUEUED is bounded by `queue_events` and `queue_bytes`, and together with the backlog on disk by
    `max_bytes`. While the disk fails, records stay QUEUED, and `put` refuses more at the bound.

    Args:
        folder: Folder of the spool.
        config: The bounds, and when to write, fsync and end a segment.
        index: Updated for every segment and its size, under `changed`.
        changed: Guards everything here and the index; notified of every change.
        make_room: Called when the disk is full; deletes what is not needed.
        metrics: What is counted.
    """

    def __init__(
        self,
        folder: Path,
        config: SpoolConfig,
        *,
        index: SegmentIndex,
        changed: threading.Condition,
        make_room: Callable[[], None],
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._index = index
        self._changed = changed
        self._make_room = make_room
        self._metrics = metrics
        self._queue: deque[tuple[bytes, _OnStored]] = deque()
        self._queued_bytes = 0
        self._num_awaited = 0
        """Queued records whose callers wait until they are stored."""
        self._closing = False
        self._rolling = False
        self._appender = Appender(folder, fsync_s=config.fsync_s)
        self.num_stored = 0
        """Records stored by this process."""
        self.fault: str | None = None
        """Why the disk takes no records; None while it does."""
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        """Records in memory; read under `changed`."""
        return len(self._queue)

    @property
    def is_closing(self) -> bool:
        """Whether `put` refuses every record."""
        return self._closing

    def put(self, record: Record, *, on_stored: _OnStored) -> None:
        """Queue a record without waiting for the disk.

        Raises:
            SpoolFull: at a bound, for a record over `max_event_bytes`, or after `close`.
        """
        data = pack(record)
        with self._changed:
            self._check_room(len(data))
            self._queue.append((data, on_stored))
            self._queued_bytes += len(data)
            if on_stored is not None:
                self._num_awaited += 1
            if on_stored is not None or len(self._queue) == 1:
                # Waking the thread takes time from the request, so it is woken once for many.
                self._changed.notify_all()

    def roll(self, *, timeout_s: float) -> bool:
        """Store what is queued and close its segment; False when that took too long."""
        with self._changed:
            self._rolling = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._rolling, timeout_s)

    def close(self, *, timeout_s: float) -> None:
        """Store what is queued; what the disk does not take is lost and counted."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            num_lost = len(self._queue)
        if num_lost:
            self._metrics.lost.labels("disk").inc(num_lost)
            logger.error("events are lost: the disk takes none", extra={"num_events": num_lost})

    def _check_room(self, size: int) -> None:
        config, backlog = self._config, self._index.backlog_bytes
        if self._closing:
            raise SpoolFull("the spool is closed")
        if size > config.max_event_bytes:
            raise SpoolFull(f"an event of {size} bytes exceeds max_event_bytes")
        if len(self._queue) >= config.queue_events:
            raise SpoolFull(f"{config.queue_events} events wait for the disk (queue_events)")
        if self._queued_bytes + size > config.queue_bytes:
            raise SpoolFull(f"{self._queued_bytes} bytes wait for the disk (queue_bytes)")
        if backlog + self._queued_bytes + size > config.max_bytes:
            raise SpoolFull(f"{backlog} bytes wait for the event log (max_bytes)")

    def _run(self) -> None:
        while not self._step():
            pass
        try:
            self._end_segment()
        except OSError as error:
            self._note_fault(error)

    def _step(self) -> bool:
        """Write one batch; True when this was the last one."""
        wait_s = self._config.fsync_s if self._appender.is_unsynced else _WAKE_S
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or self._rolling, wait_s)
            if self._queue:
                self._changed.wait_for(self._is_urgent, self._config.gather_s)
            batch, closing = self._next_batch(), self._closing
        try:
            self._write(batch)
            self._appender.sync(force=closing)
            self._end_due_segment()
        except OSError as error:
            self._note_fault(error)
            with self._changed:
                # While closing, the disk gets one more attempt and no more.
                self._changed.wait_for(lambda: self._closing, _RETRY_S)
            return closing
        if batch:
            self._note_health()
        return closing and not batch

    def _is_urgent(self) -> bool:
        return bool(self._num_awaited) or self._closing or self._rolling

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
        if not batch:
            return
        if not self._appender.is_open:
            self._appender.begin(self._index.next_number)
            with self._changed:
                # Added before its first byte, or a rewind could miss what is being written.
                self._index.begin()
        data = b"".join(piece for piece, _ in batch)
        self._appender.append(data)
        with self._changed:
            self._index.grow(len(data))
            for _, on_stored in batch:
                self._queue.popleft()
                self._num_awaited -= on_stored is not None
            self._queued_bytes -= len(data)
            self.num_stored += len(batch)
            self._changed.notify_all()
        self._metrics.spool.spooled.inc(len(batch))
        for _, on_stored in batch:
            self._call(on_stored)

    def _end_due_segment(self) -> None:
        """Close the segment if it is full or old, or if `roll` waits for it."""
        with self._changed:
            is_full = self._index.open_bytes >= self._config.segment_bytes
            is_asked = self._rolling and not self._queue
        # Without a bound on age, a quiet gateway would keep old events for ever.
        is_old = self._appender.age_s > max(self._config.retain_s / 4, _WAKE_S)
        if is_full or is_old or is_asked:
            self._end_segment()
        if is_asked:
            with self._changed:
                self._rolling = False
                self._changed.notify_all()

    def _end_segment(self) -> None:
        try:
            self._appender.end()
        finally:
            with self._changed:
                self._index.close()

    def _note_fault(self, error: OSError) -> None:
        """Note a failed write; its records stay queued."""
        self._metrics.spool.write_failures.inc()
        if self.fault is None:
            logger.error("the spool cannot be written, events wait in memory", exc_info=error)
        self.fault = str(error)
        if not self._appender.is_open:
            with self._changed:
                self._index.close()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._make_room()

    def _note_health(self) -> None:
        if self.fault is not None:
            logger.info("the spool can be written again")
            self.fault = None

    def _call(self, on_stored: _OnStored) -> None:
        try:
            if on_stored is not None:
                on_stored()
        except Exception:
            # A caller's fault must not end the thread that stores everybody's events.
            self._metrics.spool.callback_failures.inc()
            logger.exception("an event was stored, but its caller could not be told")
