"""The event log in Kafka: one consumer whose positions the caller keeps.

An offset lies in the tables, in the same commit as the rows. So offsets are never committed to the
broker, and the consumer never chooses a position by itself (`auto_offset_reset="none"`). A consumer
group, where there is one, only shares out the partitions.
"""

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from kafka import ConsumerRebalanceListener, KafkaConsumer, TopicPartition
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.errors import KafkaError, OffsetOutOfRangeError

from onlinerl.ingest.event_log.log import Fetched, LogRecord, Partition
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import MAX_MESSAGE_BYTES, Topic, TopicAdmin, broker_errors

logger = logging.getLogger(__name__)

_FETCH_BYTES = 16 * 1024**2
"""Most bytes of one answer of the broker, compressed; one record may be larger."""

_FETCH_WAIT_MS = 25
"""How long the broker may wait for records of a quiet topic: it answers one question at a time, so
a busy topic waits as long."""

_POLL_BYTES = 8 * 1024**2
"""About how many bytes one poll brings: the number of records follows their size."""


class KafkaLog:
    """The real `EventLog`. Creates the topics that are missing.

    Args:
        broker: Where the log is.
        group_id: The consumer group that shares the partitions out; None: this reader has all.
        session_timeout_s: How long a member of a group may be silent.
        check_crcs: See `IngestConfig.check_crcs`.
        max_poll_records: Most records that one poll brings.

    Raises:
        ServiceUnavailable: no broker answered.
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
        self._owned = _Owned()
        self._sought = False
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
                    check_crcs=checks_crcs(check_crcs),
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

    def topics(self) -> Mapping[str, Topic]:
        """See `EventLog`."""
        return self._admin.describe()

    def open(self, topics: Mapping[str, Topic]) -> None:
        """See `EventLog`."""
        if self._in_group:
            with broker_errors("join the consumer group"):
                listener = _Listener(self._consumer, self._owned)
                self._consumer.subscribe(sorted(topics), listener=listener)
        else:
            every = [
                TopicPartition(topic.name, number)
                for topic in topics.values()
                for number in topic.partitions
            ]
            with broker_errors("assign partitions"):
                self._consumer.assign(every)
            self._owned.change(every)
        self._sought = False

    def seek(self, positions: Mapping[Partition, int]) -> None:
        """See `EventLog`."""
        for partition in [TopicPartition(*position) for position in positions]:
            # A partition that was taken away in this moment is told by the next poll.
            with broker_errors("seek"), contextlib.suppress(ValueError, KeyError):
                self._consumer.seek(partition, positions[partition.topic, partition.partition])
                self._consumer.resume(partition)
        self._sought = True

    def pause(self) -> None:
        """See `EventLog`."""
        self._consumer.pause(*self._consumer.assignment())

    def resume(self) -> None:
        """See `EventLog`."""
        self._consumer.resume(*self._consumer.assignment())

    def poll(self, timeout_s: float) -> Fetched:
        """See `EventLog`."""
        batches: Mapping[TopicPartition, list[Any]] = {}
        if self._sought or self._in_group:
            with broker_errors("poll records"):
                try:
                    batches = self._consumer.poll(int(timeout_s * 1000), self._num_next)
                except OffsetOutOfRangeError as error:
                    return Fetched(restarted=self._to_the_earliest(error))
        if (assigned := self._owned.take()) is not None:
            self._sought = False
            return Fetched(assigned=frozenset(tuple(partition) for partition in assigned))
        records = [
            LogRecord(
                record.topic, record.partition, record.offset, record.key, record.value or b""
            )
            for batch in batches.values()
            for record in batch
        ]
        self._adapt(records)
        return Fetched(records)

    def lags(self) -> Mapping[Partition, int] | None:
        """See `EventLog`."""
        # The high watermark of the last fetch. Asking for end offsets instead is wrong on Tansu,
        # which answers with the first offset of the last batch plus one.
        here = self._consumer.assignment()
        ends = {partition: self._consumer.highwater(partition) for partition in here}
        if not self._sought or any(end is None for end in ends.values()):
            return None
        with broker_errors("read positions"), contextlib.suppress(ValueError, KeyError):
            return {
                (p.topic, p.partition): max(ends[p] - self._consumer.position(p), 0) for p in here
            }
        return None  # a partition was taken away in this moment

    def close(self) -> None:
        """See `EventLog`."""
        self._admin.close()
        with contextlib.suppress(KafkaError, OSError):
            self._consumer.close(autocommit=False, timeout_ms=1000)

    def _adapt(self, records: list[LogRecord]) -> None:
        if records:
            mean_bytes = sum(len(record.value) for record in records) // len(records) + 1
            self._num_next = min(max(_POLL_BYTES // mean_bytes, 1), self._max_poll_records)

    def _to_the_earliest(self, error: OffsetOutOfRangeError) -> list[Partition]:
        here = self._consumer.assignment()
        lost = [partition for partition in error.args[0] if partition in here]
        for partition, earliest in self._consumer.beginning_offsets(lost).items():
            self._consumer.seek(partition, earliest)
        return [(partition.topic, partition.partition) for partition in lost]


class _Owned:
    """The partitions of this reader, handed from the consumer's thread to the caller's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed: frozenset[TopicPartition] | None = None

    def change(self, partitions: Iterable[TopicPartition]) -> None:
        """Say so at the next `take`."""
        with self._lock:
            self._changed = frozenset(partitions)

    def take(self) -> frozenset[TopicPartition] | None:
        """The partitions, when they changed since the last time."""
        with self._lock:
            changed, self._changed = self._changed, None
        return changed


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc] # kafka-python is untyped
    """Notes what the group gave. Runs in the consumer's own thread, so it waits for nothing.

    A partition is paused, at a position that does not matter, until its real one was read from the
    tables: otherwise the consumer would look for a committed offset, and there is none.
    """

    def __init__(self, consumer: KafkaConsumer, owned: _Owned) -> None:
        self._consumer = consumer
        self._owned = owned

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """What was read of them is dropped when the new partitions are known."""
        self._owned.change(())

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """These are to be read."""
        for partition in assigned:
            self._consumer.seek(partition, 0)
        self._consumer.pause(*assigned)
        self._owned.change(assigned)


def checks_crcs(choice: Literal["auto", "always", "never"]) -> bool:
    """Whether checksums are looked at. In pure Python that takes 0.1 s a megabyte."""
    if choice == "auto":
        return importlib.util.find_spec("crc32c") is not None
    return choice == "always"
