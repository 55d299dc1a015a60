"""The seam to the event log: `KafkaWriter` speaks to a broker, `MemoryWriter` is its twin."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import ALL_TOPICS, TopicAdmin, broker_errors
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """What became of a batch."""

    ends: Mapping[tuple[str, int], int]
    """By topic and partition: the offset after the last record of the batch there."""

    refused: Sequence[Record] = ()
    """Records that the log refuses for ever, e.g. because they are too large."""


class LogWriter(Protocol):
    """A connection to the event log; after an error it is closed and a new one made.

    Raises:
        ServiceUnavailable: from every method, when the log does not answer in time.
    """

    def topic_ids(self) -> dict[str, str]:
        """The incarnation of every topic; topics that are missing are created."""

    def publish(self, records: Sequence[Record]) -> Published:
        """Append records in order; returns when all are acknowledged."""

    def close(self) -> None:
        """Disconnect without waiting; never raises."""


Connect = Callable[[], LogWriter]


class KafkaWriter:
    """The `LogWriter` over kafka-python: idempotent, `acks=all`, compressed.

    At most one batch is in the producer, which has no bound of its own.
    """

    def __init__(self, broker: BrokerConfig, config: SpoolConfig) -> None:
        from kafka import KafkaProducer

        self._timeout_s = config.ship_timeout_s
        timeout_ms = int(config.ship_timeout_s * 1000)
        self._admin = TopicAdmin(broker)
        try:
            # A send needs the topics to exist.
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

    def topic_ids(self) -> dict[str, str]:
        """The topic ids of Kafka (KIP-516)."""
        return {name: topic.topic_id for name, topic in self._admin.ensure(ALL_TOPICS).items()}

    def publish(self, records: Sequence[Record]) -> Published:
        """Send, flush, and look at every acknowledgement."""
        ends: dict[tuple[str, int], int] = {}
        refused = self._send(records, ends=ends)
        if len(records) > 1:
            # One record that is too large fails the batch it travels in: tell it from others.
            refused = [record for record in refused if self._send([record], ends=ends)]
        return Published(ends, refused)

    def close(self) -> None:
        """Drop what is unacknowledged: the spool has it."""
        from kafka.errors import KafkaError

        self._admin.close()
        try:
            self._producer.close(timeout=0)
        except (KafkaError, OSError):
            logger.debug("closing a producer failed", exc_info=True)

    def _send(self, records: Sequence[Record], *, ends: dict[tuple[str, int], int]) -> list[Record]:
        """Returns the records that were refused; the offsets of the others go into `ends`."""
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


class MemoryWriter:
    """A `LogWriter` that remembers, and can be away, come back empty, or refuse a record."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.incarnation = 1
        self.away = False
        self.refuses: Callable[[Record], bool] = lambda _: False
        self.num_connects = 0
        self.num_closed = 0

    def connect(self) -> LogWriter:
        """A connection; all are this object."""
        self._check()
        self.num_connects += 1
        return self

    def come_back_empty(self) -> None:
        """Lose every record; the topics are new."""
        self.records = []
        self.incarnation += 1

    def topic_ids(self) -> dict[str, str]:
        """The same id for every topic."""
        self._check()
        return {name: f"{name}#{self.incarnation}" for name in ALL_TOPICS}

    def publish(self, records: Sequence[Record]) -> Published:
        """Remember what is not refused; every topic has one partition."""
        self._check()
        refused = [record for record in records if self.refuses(record)]
        taken = [record for record in records if record not in refused]
        self.records += taken
        num_records = Counter(record.topic for record in self.records)
        ends = {(record.topic, 0): num_records[record.topic] for record in taken}
        return Published(ends, refused)

    def close(self) -> None:
        """Count."""
        self.num_closed += 1

    def _check(self) -> None:
        if self.away:
            raise ServiceUnavailable("the log is away")
