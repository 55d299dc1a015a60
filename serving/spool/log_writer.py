"""The seam to the event log: `KafkaWriter` writes to a broker, `MemoryWriter` is its twin."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import override

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import ALL_TOPICS, TopicAdmin, broker_errors
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """The result of publishing a batch."""

    ends: Mapping[tuple[str, int], int]
    """The offset after the last record of the batch, by topic and partition."""

    refused: Sequence[Record] = ()
    """Records that the log will never take, e.g. because they are too large."""


class LogWriter(Protocol):
    """A connection to the event log. After an error, close it and open another.

    Raises:
        ServiceUnavailable: from every method, when the log does not answer in time.
    """

    def topic_ids(self) -> dict[str, str]:
        """The id of every topic, which a new topic of the same name changes; creates topics."""

    def publish(self, records: Sequence[Record]) -> Published:
        """Append records in order; returns when all are acknowledged."""

    def close(self) -> None:
        """Disconnect without waiting for unacknowledged records."""


Connect = Callable[[], LogWriter]


class KafkaWriter(LogWriter):
    """The `LogWriter` over kafka-python: idempotent, `acks=all`, compressed.

    The producer has no bound of its own, so it never holds more than one batch.
    """

    def __init__(self, broker: BrokerConfig, config: SpoolConfig) -> None:
        from kafka import KafkaProducer

        self._timeout_s = config.ship_timeout_s
        timeout_ms = int(config.ship_timeout_s * 1000)
        self._admin = TopicAdmin(broker)
        try:
            # The topics have to exist before a record is sent.
            self._admin.ensure()
            with broker_errors(f"produce to {broker.bootstrap}"):
                self._producer = KafkaProducer(
                    bootstrap_servers=broker.bootstrap.split(","),
                    client_id="onlinerl-gateway",
                    acks="all",
                    enable_idempotence=True,
                    compression_type="zstd",
                    linger_ms=20,
                    batch_size=512 * 1024,
                    max_request_size=config.max_event_bytes + 1024**2,
                    max_block_ms=timeout_ms,
                    request_timeout_ms=max(timeout_ms // 2, 1),
                    delivery_timeout_ms=timeout_ms,
                    bootstrap_timeout_ms=timeout_ms,
                    reconnect_backoff_max_ms=1000,
                    allow_auto_create_topics=False,
                )
        except ServiceUnavailable:
            self._admin.close()
            raise

    @override
    def topic_ids(self) -> dict[str, str]:
        # Kafka's own ids of topics (KIP-516).
        return {name: topic.topic_id for name, topic in self._admin.ensure(ALL_TOPICS).items()}

    @override
    def publish(self, records: Sequence[Record]) -> Published:
        ends: dict[tuple[str, int], int] = {}
        refused = self._send(records, ends=ends)
        if len(records) > 1:
            # A record that is too large fails all records of its batch, so each is sent alone.
            refused = [record for record in refused if self._send([record], ends=ends)]
        return Published(ends, refused)

    @override
    def close(self) -> None:
        from kafka.errors import KafkaError

        self._admin.close()
        try:
            self._producer.close(timeout=0)
        except (KafkaError, OSError):
            logger.debug("closing a producer failed", exc_info=True)

    def _send(self, records: Sequence[Record], *, ends: dict[tuple[str, int], int]) -> list[Record]:
        """Send records, put the offsets after them into `ends`, and return the refused ones."""
        from kafka.errors import MessageSizeTooLargeError, RecordListTooLargeError

        too_large = (MessageSizeTooLargeError, RecordListTooLargeError)
        sent: list[tuple[Record, Any]] = []
        refused: list[Record] = []
        with broker_errors("send events"):
            for record in records:
                try:
                    sent.append((record, self._enqueue(record)))
                except too_large:
                    refused.append(record)
            self._producer.flush(timeout=self._timeout_s)
            for record, future in sent:
                if not future.is_done:
                    raise ServiceUnavailable("the broker did not acknowledge in time")
                if isinstance(future.exception, too_large):
                    refused.append(record)
                elif future.exception is not None:
                    raise future.exception
                else:
                    at = future.value
                    place = (at.topic, at.partition)
                    ends[place] = max(ends.get(place, 0), at.offset + 1)
        return refused

    def _enqueue(self, record: Record) -> Any:  # noqa: ANN401 kafka-python is untyped
        return self._producer.send(record.topic, key=record.key.encode(), value=record.value)


class MemoryWriter(LogWriter):
    """Twin of `KafkaWriter` for tests. It can be away, come back empty, or refuse records."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.incarnation = 1
        self.away = False
        """Whether every method raises."""
        self.refuses: Callable[[Record], bool] = lambda _: False
        self.num_connects = 0
        self.num_closed = 0

    def connect(self) -> LogWriter:
        """Open a connection; every connection is this object."""
        self._check()
        self.num_connects += 1
        return self

    def come_back_empty(self) -> None:
        """Lose every record and give the topics new ids."""
        self.records = []
        self.incarnation += 1

    @override
    def topic_ids(self) -> dict[str, str]:
        self._check()
        return {name: f"{name}#{self.incarnation}" for name in ALL_TOPICS}

    @override
    def publish(self, records: Sequence[Record]) -> Published:
        self._check()
        refused = [record for record in records if self.refuses(record)]
        taken = [record for record in records if record not in refused]
        self.records += taken
        num_records = Counter(record.topic for record in self.records)
        ends = {(record.topic, 0): num_records[record.topic] for record in taken}
        return Published(ends, refused)

    @override
    def close(self) -> None:
        self.num_closed += 1

    def _check(self) -> None:
        if self.away:
            raise ServiceUnavailable("the log is away")
