"""The event log in Kafka: one consumer whose positions the caller keeps.

Offsets are stored in the tables, in the same commit as the rows. So they are never committed to the
broker, and the consumer never chooses a position itself (`auto_offset_reset="none"`). A consumer
group, when there is one, only distributes the partitions.
"""

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from kafka import ConsumerRebalanceListener, KafkaConsumer, TopicPartition
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.errors import IllegalStateError, KafkaError, OffsetOutOfRangeError
from typing_extensions import override

from onlinerl.ingest.event_log.log import EventLog, LogRecord, Partition, PollResult
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import MAX_MESSAGE_BYTES, Topic, TopicAdmin, broker_errors

logger = logging.getLogger(__name__)

_FETCH_BYTES = 16 * 1024**2
"""Most bytes of one response of the broker, compressed; a single record may be larger."""

_FETCH_WAIT_MS = 25
"""Milliseconds that the broker may wait for records of a quiet topic. A busy topic waits as long,
because the broker answers the requests of a connection one after another."""

_POLL_BYTES = 8 * 1024**2
"""About how many bytes one poll returns: the larger the records, the fewer are asked for."""


class KafkaLog(EventLog):
    """The real `EventLog`. Creates the topics that are missing.

    Args:
        broker: Addresses and timeouts.
        group_id: Consumer group that distributes the partitions; None gives this reader all of
            them.
        session_timeout_s: Seconds that a member of the group may be silent.
        check_crcs: See `IngestConfig.check_crcs`.
        max_poll_records: Most records that one poll returns.

    Raises:
        ServiceUnavailable: No broker answered.
    """

    def __init__(
        self,
        broker: BrokerConfig,
        *,
        group_id: str | None = None,
        session_timeout_s: float = 10.0,
        check_crcs: Literal["auto", "always", "never"] = "auto",
        max_poll_records: int = 4_000,
    ) -> None:
        timeout_ms = int(broker.request_timeout_s * 1000)
        session_ms = int(session_timeout_s * 1000)
        self._in_group = group_id is not None
        self._max_poll_records = max_poll_records
        self._num_next = min(500, max_poll_records)
        self._assigned = _AssignedPartitions()
        self._has_positions = False
        self._admin = TopicAdmin(broker)
        try:
            self._admin.ensure()
            with broker_errors(f"reach a broker at {broker.bootstrap}"):
                self._consumer = KafkaConsumer(
                    bootstrap_servers=broker.addresses,
                    client_id="onlinerl-ingest",
                    group_id=group_id,
                    enable_auto_commit=False,
                    auto_offset_reset="none",
                    allow_auto_create_topics=False,
                    check_crcs=should_check_crcs(check_crcs),
                    fetch_max_bytes=_FETCH_BYTES,
                    fetch_max_wait_ms=_FETCH_WAIT_MS,
                    max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
                    request_timeout_ms=max(timeout_ms, session_ms + 1000 if group_id else 0),
                    session_timeout_ms=session_ms,
                    heartbeat_interval_ms=session_ms // 4,
                    # Partition 0 of both topics goes to one process, 1 to the next, and so on.
                    partition_assignment_strategy=(RangePartitionAssignor,),
                    bootstrap_timeout_ms=timeout_ms,
                    reconnect_backoff_max_ms=1000,
                )
        except BaseException:
            self._admin.close()
            raise

    @override
    def topics(self) -> Mapping[str, Topic]:
        return self._admin.describe()

    @override
    def open(self, topics: Mapping[str, Topic]) -> None:
        if self._in_group:
            with broker_errors("join the consumer group"):
                listener = _Listener(self._consumer, self._assigned)
                self._consumer.subscribe(sorted(topics), listener=listener)
        else:
            every = [
                TopicPartition(topic.name, number)
                for topic in topics.values()
                for number in topic.partitions
            ]
            with broker_errors("assign partitions"):
                self._consumer.assign(every)
            self._assigned.change(every)
        self._has_positions = False

    @override
    def seek(self, positions: Mapping[Partition, int]) -> None:
        for (topic, number), offset in positions.items():
            partition = TopicPartition(topic, number)
            with broker_errors("seek"), self._unless_revoked(partition):
                self._consumer.seek(partition, offset)
                self._consumer.resume(partition)
        self._has_positions = True

    @override
    def pause(self) -> None:
        for partition in self._consumer.assignment():
            with self._unless_revoked(partition):
                self._consumer.pause(partition)

    @override
    def resume(self) -> None:
        for partition in self._consumer.assignment():
            with self._unless_revoked(partition):
                self._consumer.resume(partition)

    @override
    def poll(self, timeout_s: float) -> PollResult:
        batches: Mapping[TopicPartition, list[Any]] = {}
        if self._has_positions or self._in_group:
            with broker_errors("poll records"):
                try:
                    batches = self._consumer.poll(int(timeout_s * 1000), self._num_next)
                except OffsetOutOfRangeError as error:
                    return PollResult(restarted=self._to_the_earliest(error))
        if (assigned := self._assigned.take()) is not None:
            self._has_positions = False
            return PollResult(assigned=frozenset(tuple(partition) for partition in assigned))
        records = [
            LogRecord(
                record.topic, record.partition, record.offset, record.key, record.value or b""
            )
            for batch in batches.values()
            for record in batch
        ]
        self._adapt(records)
        return PollResult(records)

    @override
    def lags(self) -> Mapping[Partition, int] | None:
        # The high watermark of the last fetch. Tansu's end offsets are wrong: it answers with the
        # first offset of the last batch plus one.
        if not self._has_positions:
            return None
        partitions = self._consumer.assignment()
        ends = self._of_each(partitions, self._consumer.highwater)
        if ends is None:
            return None
        positions = self._of_each(partitions, self._consumer.position)
        if positions is None:
            return None
        return {(p.topic, p.partition): max(ends[p] - positions[p], 0) for p in partitions}

    @override
    def close(self) -> None:
        self._admin.close()
        with contextlib.suppress(KafkaError, OSError):
            self._consumer.close(autocommit=False, timeout_ms=1000)

    def _of_each(
        self, partitions: Iterable[TopicPartition], ask: Callable[[TopicPartition], int | None]
    ) -> dict[TopicPartition, int] | None:
        """The answer for every partition; None when one is unknown or was just taken away."""
        answers: dict[TopicPartition, int] = {}
        for partition in partitions:
            answer = None
            with broker_errors("read positions"), self._unless_revoked(partition):
                answer = ask(partition)
            if answer is None:
                return None
            answers[partition] = answer
        return answers

    @contextlib.contextmanager
    def _unless_revoked(self, partition: TopicPartition) -> Iterator[None]:
        """Ignore errors about a partition that the group has just taken away.

        The consumer's own thread takes partitions away at any moment; the next poll reports it.
        """
        try:
            yield
        except (ValueError, KeyError, IllegalStateError):
            if partition in self._consumer.assignment():
                raise

    def _adapt(self, records: list[LogRecord]) -> None:
        if records:
            mean_bytes = sum(len(record.value) for record in records) // len(records) + 1
            self._num_next = min(max(_POLL_BYTES // mean_bytes, 1), self._max_poll_records)

    def _to_the_earliest(self, error: OffsetOutOfRangeError) -> list[Partition]:
        assigned = self._consumer.assignment()
        lost = [partition for partition in error.args[0] if partition in assigned]
        for partition, earliest in self._consumer.beginning_offsets(lost).items():
            self._consumer.seek(partition, earliest)
        return [(partition.topic, partition.partition) for partition in lost]


class _AssignedPartitions:
    """The partitions of this reader, passed from the consumer's thread to the caller's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed: frozenset[TopicPartition] | None = None

    def change(self, partitions: Iterable[TopicPartition]) -> None:
        """Let the next `take` return these partitions."""
        with self._lock:
            self._changed = frozenset(partitions)

    def take(self) -> frozenset[TopicPartition] | None:
        """The partitions, or None when they did not change since the last call."""
        with self._lock:
            changed, self._changed = self._changed, None
        return changed


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc] # kafka-python is untyped
    """Remembers which partitions the group assigned. Runs in the consumer's thread: never waits.

    A new partition is paused at position 0 until its position was read from the tables. Without a
    position the consumer would look for a committed offset, and there is none.
    """

    def __init__(self, consumer: KafkaConsumer, assigned: _AssignedPartitions) -> None:
        self._consumer = consumer
        self._assigned = assigned

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Report no partitions; the caller then drops what it read of the old ones."""
        self._assigned.change(())

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Report the partitions to read."""
        for partition in assigned:
            self._consumer.seek(partition, 0)
        self._consumer.pause(*assigned)
        self._assigned.change(assigned)


def should_check_crcs(choice: Literal["auto", "always", "never"]) -> bool:
    """Whether to verify checksums. In pure Python that takes 0.1 s per megabyte."""
    if choice == "auto":
        return importlib.util.find_spec("crc32c") is not None
    return choice == "always"
