"""Records that wait to be committed, bounded by number, size and age."""

from collections.abc import Callable, Sequence

from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import LogRecord


def size_of(records: Sequence[LogRecord]) -> int:
    """Bytes of keys and values."""
    return sum([len(record.value) + len(record.key or b"") for record in records])


class TopicBuffer:
    """Records of one topic in the order they were read. What bounds it is who fills it."""

    def __init__(self, config: IngestConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._records: list[LogRecord] = []
        self._oldest_at = 0.0
        self.size_bytes = 0
        """Of all records in it."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, records: Sequence[LogRecord]) -> None:
        """Append records."""
        if records and not self._records:
            self._oldest_at = self._clock()
        self._records.extend(records)
        self.size_bytes += size_of(records)

    def is_due(self) -> bool:
        """Whether the batch is as large or as old as it may get."""
        return bool(self._records) and (
            len(self._records) >= self._config.max_batch_rows
            or self.size_bytes >= self._config.max_batch_bytes
            or self._clock() - self._oldest_at >= self._config.max_batch_age_s
        )

    def take(self) -> list[LogRecord]:
        """Everything, leaving the buffer empty."""
        records, self._records, self.size_bytes = self._records, [], 0
        return records
