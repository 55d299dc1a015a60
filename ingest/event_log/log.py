"""The event log as ingest sees it: topics with ids, positions, records.

`KafkaLog` (in `kafka_log`) is the real one; `MemoryLog` is its twin for unit tests and can be
recreated, cut off at the front and taken away.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.event_log import Topic

Partition = tuple[str, int]
"""Topic name and partition number."""


class LogRecord(NamedTuple):
    """One record as it lies in the log; a missing value reads as empty."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes


@dataclass(frozen=True)
class Fetched:
    """What one poll brought."""

    records: Sequence[LogRecord] = ()
    restarted: Sequence[Partition] = ()
    """Partitions whose position is not in the log any more; they go on at the earliest record."""
    assigned: frozenset[Partition] | None = None
    """Not None when the partitions to read changed: these are the ones now. None of them is read
    before `seek` says from where, and no record comes along."""


class EventLog(Protocol):
    """Reads records in order from positions that the caller keeps.

    `OPENED -> assigned -> sought -> polled`, and back to assigned when partitions change hands.
    Every method raises `ServiceUnavailable` when the log does not answer within its timeout.
    """

    def topics(self) -> Mapping[str, Topic]:
        """The topics as they are now; those that do not exist are left out."""
        ...

    def open(self, topics: Mapping[str, Topic]) -> None:
        """Ask for the partitions of these topics; `poll` tells which ones this reader gets."""
        ...

    def seek(self, positions: Mapping[Partition, int]) -> None:
        """Read the assigned partitions from these offsets; ends a pause."""
        ...

    def pause(self) -> None:
        """Fetch no records until `resume`; polling goes on, so that no partition is taken away."""
        ...

    def resume(self) -> None:
        """Fetch records again."""
        ...

    def poll(self, timeout_s: float) -> Fetched:
        """New records, or nothing when none came in time. In order within a partition."""
        ...

    def lags(self) -> Mapping[Partition, int] | None:
        """Per partition the records that were not polled yet; None while it is unknown."""
        ...

    def close(self) -> None:
        """Disconnect; never raises."""
        ...


@dataclass
class _Partition:
    records: list[LogRecord] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.records)


class MemoryLog:
    """An event log in memory that survives its readers.

    Args:
        names: Topics to create.
        partitions: Partitions of each.
        max_poll_records: Most records of a partition that one poll brings.
    """

    def __init__(
        self, names: Sequence[str], *, partitions: int = 1, max_poll_records: int = 2_000
    ) -> None:
        self.available = True
        self._max_poll_records = max_poll_records
        self._names, self._num_partitions = tuple(names), partitions
        self._incarnation = itertools.count(1)
        self._positions: dict[Partition, int] = {}
        self._assigned: frozenset[Partition] | None = None
        self.paused = False
        self.recreate()

    def recreate(self) -> None:
        """Lose every record and count from 0 under new ids, like a broker without its disk."""
        generation = next(self._incarnation)
        numbers = tuple(range(self._num_partitions))
        self._topics = {n: Topic(n, f"{n}-{generation}", numbers) for n in self._names}
        self._logs = {(n, p): _Partition() for n in self._names for p in numbers}

    def produce(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int = 0
    ) -> int:
        """Append a record; returns its offset."""
        log = self._logs[topic, partition]
        log.records.append(LogRecord(topic, partition, log.end, key, value))
        return log.end - 1

    def expire(self, topic: str, count: int, *, partition: int = 0) -> None:
        """Drop the oldest records, like retention does."""
        log = self._logs[topic, partition]
        log.records, log.start = log.records[count:], log.start + count

    def truncate(self, topic: str, count: int, *, partition: int = 0) -> None:
        """Drop the newest records and keep the topic id, like an unclean leader election."""
        del self._logs[topic, partition].records[-count:]

    def topics(self) -> Mapping[str, Topic]:
        """See `EventLog`."""
        self._check()
        return dict(self._topics)

    def open(self, topics: Mapping[str, Topic]) -> None:
        """See `EventLog`; every partition is this reader's until `reassign`."""
        self._check()
        self.reassign({(topic.name, n) for topic in topics.values() for n in topic.partitions})

    def reassign(self, partitions: Iterable[Partition]) -> None:
        """Let the next poll say that only these are this reader's, as a rebalance does."""
        self._assigned = frozenset(partitions)
        self._positions, self.paused = {}, False

    def seek(self, positions: Mapping[Partition, int]) -> None:
        """See `EventLog`."""
        self._check()
        self._positions, self.paused = dict(positions), False

    def pause(self) -> None:
        """See `EventLog`."""
        self.paused = True

    def resume(self) -> None:
        """See `EventLog`."""
        self.paused = False

    def poll(self, timeout_s: float) -> Fetched:
        """See `EventLog`; never waits."""
        self._check()
        if self._assigned is not None:
            assigned, self._assigned = self._assigned, None
            return Fetched(assigned=assigned)
        if self.paused:
            return Fetched()
        restarted = [
            partition
            for partition, position in self._positions.items()
            if not self._logs[partition].start <= position <= self._logs[partition].end
        ]
        for partition in restarted:
            self._positions[partition] = self._logs[partition].start
        records: list[LogRecord] = []
        for partition, position in self._positions.items():
            log = self._logs[partition]
            first = position - log.start
            batch = log.records[first : first + self._max_poll_records]
            records += batch
            self._positions[partition] = position + len(batch)
        return Fetched(records, restarted)

    def lags(self) -> Mapping[Partition, int] | None:
        """See `EventLog`."""
        return {p: max(self._logs[p].end - at, 0) for p, at in self._positions.items()}

    def close(self) -> None:
        """See `EventLog`."""

    def _check(self) -> None:
        if not self.available:
            raise ServiceUnavailable("the log was taken away")
