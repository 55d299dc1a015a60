"""The event log as ingest sees it: topics with ids, positions, records.

`KafkaLog` (in `kafka`) is the real one. `MemoryLog` is its twin for unit tests: a test can recreate
it, cut it at either end, and make it unavailable.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from typing_extensions import override

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.event_log import Topic

Partition = tuple[str, int]
"""Topic name and partition number."""


class LogRecord(NamedTuple):
    """One record of the log; a record without a value has an empty one."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes


@dataclass(frozen=True)
class PollResult:
    """The result of one `EventLog.poll`."""

    records: Sequence[LogRecord] = ()
    restarted: Sequence[Partition] = ()
    """Partitions whose position is no longer in the log. Reading them continues at their earliest
    record."""
    assigned: frozenset[Partition] | None = None
    """All partitions that this reader has now, or None when they did not change. Such a result has
    no records; call `seek` before any are read."""


class EventLog(Protocol):
    """Reads records in order, from positions that the caller keeps.

    Call `open`, then `poll` until it assigns partitions, then `seek`, then `poll` for records. When
    `poll` assigns other partitions, call `seek` again. Every method but `close` raises
    `ServiceUnavailable` when the log does not answer within its timeout.
    """

    def topics(self) -> Mapping[str, Topic]:
        """The topics by name, as they are now; missing ones are left out."""
        ...

    def open(self, topics: Mapping[str, Topic]) -> None:
        """Ask for the partitions of these topics; `poll` returns which ones this reader gets."""
        ...

    def seek(self, positions: Mapping[Partition, int]) -> None:
        """Read the assigned partitions from these offsets on. Ends a pause."""
        ...

    def pause(self) -> None:
        """Fetch no records until `resume`. Keep polling: a silent reader loses its partitions."""
        ...

    def resume(self) -> None:
        """Fetch records again."""
        ...

    def poll(self, timeout_s: float) -> PollResult:
        """New records, in order within a partition; none when the timeout passes."""
        ...

    def lags(self) -> Mapping[Partition, int] | None:
        """Number of records not polled yet, by partition; None while it is unknown."""
        ...

    def close(self) -> None:
        """Disconnect. Never raises."""
        ...


@dataclass
class _Partition:
    records: list[LogRecord] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.records)


class MemoryLog(EventLog):
    """An event log in memory, for unit tests. Its records survive `close`.

    Args:
        names: Topics to create.
        partitions: Number of partitions of each topic.
        max_poll_records: Most records of one partition that a poll returns.
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
        """Drop all records and give the topics new ids, like a broker that lost its disk."""
        generation = next(self._incarnation)
        numbers = tuple(range(self._num_partitions))
        self._topics = {n: Topic(n, f"{n}-{generation}", numbers) for n in self._names}
        self._logs = {(n, p): _Partition() for n in self._names for p in numbers}

    def produce(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int = 0
    ) -> int:
        """Append a record and return its offset."""
        log = self._logs[topic, partition]
        log.records.append(LogRecord(topic, partition, log.end, key, value))
        return log.end - 1

    def expire(self, topic: str, count: int, *, partition: int = 0) -> None:
        """Drop the oldest `count` records, as retention does."""
        log = self._logs[topic, partition]
        log.records, log.start = log.records[count:], log.start + count

    def truncate(self, topic: str, count: int, *, partition: int = 0) -> None:
        """Drop the newest `count` records, as an unclean leader election does; ids stay."""
        del self._logs[topic, partition].records[-count:]

    @override
    def topics(self) -> Mapping[str, Topic]:
        self._check()
        return dict(self._topics)

    @override
    def open(self, topics: Mapping[str, Topic]) -> None:
        self._check()
        self.reassign({(topic.name, n) for topic in topics.values() for n in topic.partitions})

    def reassign(self, partitions: Iterable[Partition]) -> None:
        """Let the next poll assign only these partitions, as a rebalance does."""
        self._assigned = frozenset(partitions)
        self._positions, self.paused = {}, False

    @override
    def seek(self, positions: Mapping[Partition, int]) -> None:
        self._check()
        self._positions, self.paused = dict(positions), False

    @override
    def pause(self) -> None:
        self.paused = True

    @override
    def resume(self) -> None:
        self.paused = False

    @override
    def poll(self, timeout_s: float) -> PollResult:
        """Return at once, whatever the timeout."""
        self._check()
        if self._assigned is not None:
            assigned, self._assigned = self._assigned, None
            return PollResult(assigned=assigned)
        if self.paused:
            return PollResult()
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
        return PollResult(records, restarted)

    @override
    def lags(self) -> Mapping[Partition, int] | None:
        return {p: max(self._logs[p].end - at, 0) for p, at in self._positions.items()}

    @override
    def close(self) -> None:
        """Keep the records."""

    def _check(self) -> None:
        if not self.available:
            raise ServiceUnavailable("the log is unavailable")
