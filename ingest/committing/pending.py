"""Records that were read and are not committed yet, bounded over all topics."""

from collections.abc import Callable, Sequence

from onlinerl.ingest import metrics
from onlinerl.ingest.batches.sorting import ROUTES
from onlinerl.ingest.committing.buffer import TopicBuffer
from onlinerl.ingest.committing.commit_thread import CommitThread
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import LogRecord


class PendingRecords:
    """The buffers of all topics, and the batch that is being written.

    Args:
        commit_thread: Writes the batches.
        config: When a batch is due, and how many bytes may be held.
        clock: Monotonic seconds.
    """

    def __init__(
        self, commit_thread: CommitThread, *, config: IngestConfig, clock: Callable[[], float]
    ) -> None:
        self._commit_thread = commit_thread
        self._max_bytes = config.max_buffered_bytes
        self._buffers = {route.topic: TopicBuffer(config, clock=clock) for route in ROUTES}

    @property
    def size_bytes(self) -> int:
        """Size of all records, buffered or being written."""
        waiting = sum(buffer.size_bytes for buffer in self._buffers.values())
        return waiting + self._commit_thread.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether reading should stop until a commit is done."""
        return self.size_bytes >= self._max_bytes

    @property
    def is_waiting(self) -> bool:
        """Whether a batch is due while another one is still being written."""
        is_due = any(buffer.is_due() for buffer in self._buffers.values())
        return self._commit_thread.is_busy and is_due

    def add(self, records: Sequence[LogRecord]) -> None:
        """Buffer records; the caller has checked that their topics were not created anew."""
        for topic, buffer in self._buffers.items():
            buffer.add([record for record in records if record.topic == topic])
        metrics.BUFFERED_BYTES.set(self.size_bytes)

    def advance(self) -> None:
        """Settle a batch that was written, and begin to write the next one that is due.

        When the buffers are full, the largest one is written even if it is not due.

        Raises:
            StoreConflict, ServiceUnavailable: From the batch that was written; call `drop`.
        """
        if not self._commit_thread.is_busy:
            self._commit_thread.settle()
        if not self._commit_thread.is_free:
            return
        largest = max(self._buffers.values(), key=lambda buffer: buffer.size_bytes)
        for route in ROUTES:
            buffer = self._buffers[route.topic]
            if buffer.is_due() or (self.is_full and buffer is largest):
                self._commit_thread.submit(route, buffer.take())
                return

    def flush(self) -> None:
        """Write all records and wait until they are committed.

        Raises:
            StoreConflict, ServiceUnavailable: From the writing.
        """
        self._commit_thread.settle()
        for route in ROUTES:
            self._commit_thread.submit(route, self._buffers[route.topic].take())
            self._commit_thread.settle()

    def drop(self) -> None:
        """Forget all records that are not being written."""
        for buffer in self._buffers.values():
            buffer.take()
