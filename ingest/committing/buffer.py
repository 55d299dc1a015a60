"""Records of one topic that wait to be committed."""

from collections.abc import Callable, Sequence

from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import LogRecord


def size_of(records: Sequence[LogRecord]) -> int:
    """Bytes of all keys and values."""
    return sum([len(record.value) + len(record.key or b"") for record in records])


class TopicBuffer:
    """Records of one topic, in the order they were read.

    The buffer has no bound of its own: the caller commits it when `is_due`.
    """

    def __init__(self, config: IngestConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._records: list[LogRecord] = []
        self._oldest_at = 0.0
        self.size_bytes = 0
        """Size of all records in the buffer."""

    def __len__(self) -> int:
        return len(self._records)

    def add(self, records: Sequence[LogRecord]) -> None:
        """Append records."""
        if records and not self._records:
            self._oldest_at = self._clock()
        self._records.extend(records)
        self.size_bytes += size_of(records)

    def is_due(self) -> bool:
        """Whether the records have reached the number, size or age at which they are committed."""
        return bool(self._records) and (
            len(self._records) >= self._config.max_batch_rows
            or self.size_bytes >= self._config.max_batch_bytes
            or self._clock() - self._oldest_at >= self._config.max_batch_age_s
        )

    def take(self) -> list[LogRecord]:
        """Return all records and empty the buffer."""
        records, self._records, self.size_bytes = self._records, [], 0
        return records
