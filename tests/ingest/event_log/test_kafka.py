"""`KafkaLog` around a consumer that loses partitions; real brokers are in the integration tests."""

from collections.abc import Callable
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.errors import IllegalStateError

from onlinerl.ingest.event_log import kafka
from onlinerl.ingest.event_log.kafka import KafkaLog
from onlinerl.rollout_store.config import BrokerConfig

FIRST, SECOND = TopicPartition("t", 0), TopicPartition("t", 1)


class Consumer:
    """The part of `KafkaConsumer` that is used; `fails` runs before every call on a partition."""

    def __init__(self, **_: object) -> None:
        self.assigned = {FIRST, SECOND}
        self.positions: dict[TopicPartition, int] = {}
        self.paused: set[TopicPartition] = set()
        self.fails: Callable[[TopicPartition], None] = lambda partition: None

    def assignment(self) -> set[TopicPartition]:
        return set(self.assigned)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.fails(partition)
        if offset < 0:
            raise ValueError("Offset must be int >= 0")
        self.positions[partition] = offset

    def pause(self, partition: TopicPartition) -> None:
        self.fails(partition)
        self.paused.add(partition)

    def resume(self, partition: TopicPartition) -> None:
        self.paused.discard(partition)

    def highwater(self, partition: TopicPartition) -> int:
        self.fails(partition)
        return 10

    def position(self, partition: TopicPartition) -> int:
        return self.positions[partition]


class Admin:
    def __init__(self, broker: BrokerConfig) -> None:
        pass

    def ensure(self) -> None:
        pass


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> KafkaLog:
    monkeypatch.setattr(kafka, "KafkaConsumer", Consumer)
    monkeypatch.setattr(kafka, "TopicAdmin", Admin)
    return KafkaLog(BrokerConfig(), group_id="g")


def consumer_of(log: KafkaLog) -> Any:
    return log._consumer


def revoke(log: KafkaLog, error: Exception) -> None:
    """The group takes the second partition away in the middle of the next call on it."""
    consumer = consumer_of(log)

    def fails(partition: TopicPartition) -> None:
        if partition == SECOND:
            consumer.assigned.discard(SECOND)
            raise error

    consumer.fails = fails


@pytest.mark.parametrize(
    "error", [ValueError("Unassigned partition"), KeyError(SECOND), IllegalStateError()]
)
def test_a_partition_that_is_taken_away_meanwhile_is_passed_over(
    log: KafkaLog, error: Exception
) -> None:
    revoke(log, error)
    log.seek({("t", 0): 4, ("t", 1): 7})

    assert consumer_of(log).positions == {FIRST: 4}


def test_lags_are_unknown_while_a_partition_is_taken_away(log: KafkaLog) -> None:
    log.seek({("t", 0): 4, ("t", 1): 7})
    assert log.lags() == {("t", 0): 6, ("t", 1): 3}

    revoke(log, IllegalStateError("Partition is not assigned"))

    assert log.lags() is None
    assert log.lags() == {("t", 0): 6}


def test_a_pause_passes_over_a_partition_that_is_taken_away(log: KafkaLog) -> None:
    revoke(log, KeyError(SECOND))
    log.pause()

    assert consumer_of(log).paused == {FIRST}


def test_a_wrong_position_is_not_taken_for_a_lost_partition(log: KafkaLog) -> None:
    with pytest.raises(ValueError, match="Offset"):
        log.seek({("t", 0): -1})
