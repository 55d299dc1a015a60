"""Records on their way from the log to the tables: gathered by topic, bounded over all of them."""

from collections.abc import Callable, Sequence

from onlinerl.ingest import metrics
from onlinerl.ingest.batches.sorting import ROUTES
from onlinerl.ingest.committing.buffer import TopicBuffer
from onlinerl.ingest.committing.lane import CommitLane
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import LogRecord


class Gathering:
    """The buffers of all topics and the batch that is being written.

    Args:
        lane: Where batches are written.
        config: When a batch is due, and how much may be held.
        clock: Monotonic seconds.
    """

    def __init__(
        self, lane: CommitLane, *, config: IngestConfig, clock: Callable[[], float]
    ) -> None:
        self._lane = lane
        self._max_bytes = config.max_buffered_bytes
        self._buffers = {route.topic: TopicBuffer(config, clock=clock) for route in ROUTES}

    @property
    def size_bytes(self) -> int:
        """Of everything that is held."""
        waiting = sum(buffer.size_bytes for buffer in self._buffers.values())
        return waiting + self._lane.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be read now."""
        return self.size_bytes >= self._max_bytes

    @property
    def is_waiting(self) -> bool:
        """Whether a batch is due and another one is still being written."""
        return self._lane.is_busy and any(buffer.is_due() for buffer in self._buffers.values())

    def add(self, records: Sequence[LogRecord]) -> None:
        """Hold these records, which are known to be of the topics as they are now."""
        for topic, buffer in self._buffers.items():
            buffer.add([record for record in records if record.topic == topic])
        metrics.BUFFERED_BYTES.set(self.size_bytes)

    def advance(self) -> None:
        """Settle a batch that was written, and begin with one that is due, or has to be.

        Raises:
            StoreConflict, ServiceUnavailable: from the batch that was written; drop the rest.
        """
        if not self._lane.is_busy:
            self._lane.settle()
        if not self._lane.is_free:
            return
        largest = max(self._buffers.values(), key=lambda buffer: buffer.size_bytes)
        for route in ROUTES:
            buffer = self._buffers[route.topic]
            if buffer.is_due() or (self.is_full and buffer is largest):
                self._lane.submit(route, buffer.take())
                return

    def flush(self) -> None:
        """Write everything, and wait for it.

        Raises:
            StoreConflict, ServiceUnavailable: from the writing.
        """
        self._lane.settle()
        for route in ROUTES:
            self._lane.submit(route, self._buffers[route.topic].take())
            self._lane.settle()

    def drop(self) -> None:
        """Forget what is not being written."""
        for buffer in self._buffers.values():
            buffer.take()
