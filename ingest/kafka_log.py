"""The event log in Kafka: one consumer without a group, positions kept by the caller.

Groups are of no use here: the offset lies in the tables, in the same commit as the rows. The
consumer never chooses a position by itself (`auto_offset_reset="none"`).
"""

import contextlib
from collections.abc import Mapping

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError, OffsetOutOfRangeError

from onlinerl.ingest.log import Fetched, LogRecord, Partition
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.kafka_topics import (
    MAX_MESSAGE_BYTES,
    Topic,
    TopicAdmin,
    broker_errors,
)


class KafkaLog:
    """The real `EventLog`. Creates the topics that are missing.

    Raises:
        ServiceUnavailable: no broker answered.
    """

    def __init__(self, broker: BrokerConfig, *, max_poll_records: int = 2_000) -> None:
        timeout_ms = int(broker.request_timeout_s * 1000)
        self._admin = TopicAdmin(broker)
        try:
            self._admin.ensure()
            with broker_errors(f"reach a broker at {broker.bootstrap}"):
                self._consumer = KafkaConsumer(
                    bootstrap_servers=broker.addresses,
                    client_id="onlinerl-ingest",
                    group_id=None,
                    enable_auto_commit=False,
                    auto_offset_reset="none",
                    allow_auto_create_topics=False,
                    max_poll_records=max_poll_records,
                    max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
                    request_timeout_ms=timeout_ms,
                    bootstrap_timeout_ms=timeout_ms,
                    reconnect_backoff_max_ms=1000,
                )
        except BaseException:
            self._admin.close()
            raise
        self._assigned: list[TopicPartition] = []

    def topics(self) -> Mapping[str, Topic]:
        """See `EventLog`."""
        return self._admin.describe()

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """See `EventLog`."""
        with broker_errors("assign partitions"):
            self._assigned = [TopicPartition(topic, number) for topic, number in positions]
            self._consumer.assign(self._assigned)
            for partition in self._assigned:
                self._consumer.seek(partition, positions[tuple(partition)])

    def poll(self, timeout_s: float) -> Fetched:
        """See `EventLog`."""
        with broker_errors("poll records"):
            try:
                batches = self._consumer.poll(timeout_ms=int(timeout_s * 1000))
            except OffsetOutOfRangeError as error:
                return Fetched(restarted=self._to_the_earliest(error))
        records = [
            LogRecord(
                record.topic, record.partition, record.offset, record.key, record.value or b""
            )
            for batch in batches.values()
            for record in batch
        ]
        return Fetched(records)

    def lag(self) -> int | None:
        """See `EventLog`."""
        # The high watermark of the last fetch. Asking for end offsets instead is wrong on Tansu,
        # which answers with the first offset of the last batch plus one.
        ends = {p: self._consumer.highwater(p) for p in self._assigned}
        if any(end is None for end in ends.values()):
            return None
        with broker_errors("read positions"):
            lags = [max(ends[p] - self._consumer.position(p), 0) for p in self._assigned]
        return int(sum(lags))

    def close(self) -> None:
        """See `EventLog`."""
        self._admin.close()
        with contextlib.suppress(KafkaError, OSError):
            self._consumer.close(autocommit=False, timeout_ms=1000)

    def _to_the_earliest(self, error: OffsetOutOfRangeError) -> list[Partition]:
        lost = [partition for partition in error.args[0] if partition in self._assigned]
        for partition, earliest in self._consumer.beginning_offsets(lost).items():
            self._consumer.seek(partition, earliest)
        return [(partition.topic, partition.partition) for partition in lost]
