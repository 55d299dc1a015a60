"""`KafkaLog` and the topics against real brokers."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from onlinerl.errors import ServiceUnavailable
from onlinerl.ingest.event_log.kafka import KafkaLog
from onlinerl.ingest.event_log.log import LogRecord, Partition, PollResult
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import ALL_TOPICS, TopicAdmin, ensure_topics
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, INTERACTIONS_TOPIC
from tests.brokers import Broker, free_port, kafka, needs_kafka, tansu

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FIRST = (INTERACTIONS_TOPIC, 0)
START = {FIRST: 0, (FEEDBACK_TOPIC, 0): 0}


@pytest.fixture(params=["tansu", pytest.param("kafka", marks=needs_kafka)])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with {"tansu": tansu, "kafka": kafka}[request.param](tmp_path) as broker:
        yield broker


def config(broker: Broker, **changes: object) -> BrokerConfig:
    fields = {"bootstrap": broker.bootstrap, "request_timeout_s": 15}
    return BrokerConfig.model_validate(fields | changes)


def produce(broker: Broker, *values: bytes, topic: str = INTERACTIONS_TOPIC) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=broker.bootstrap, linger_ms=20, max_request_size=8 * 1024**2
    )
    for value in values:
        producer.send(topic, value, key=b"k")
    producer.flush(30)
    producer.close(5)


def start(log: KafkaLog, positions: Mapping[Partition, int]) -> None:
    """Read every partition from these positions."""
    log.open(log.topics())
    assert log.poll(0).assigned == frozenset(positions)
    log.seek(positions)


def poll(log: KafkaLog, count: int) -> list[LogRecord]:
    """At least so many records, or what came within a minute."""
    records: list[LogRecord] = []
    deadline = time.monotonic() + 60
    while len(records) < count and time.monotonic() < deadline:
        records += log.poll(0.2).records
    return records


def test_records_come_in_order_from_the_assigned_position(broker: Broker) -> None:
    with closing(KafkaLog(config(broker))) as log:
        produce(broker, *(b"%d" % n for n in range(7)))
        start(log, {**START, FIRST: 3})

        records = poll(log, 4)
        assert [(r.offset, r.value, r.key) for r in records] == [
            (n, b"%d" % n, b"k") for n in range(3, 7)
        ]
        assert records[0].topic == INTERACTIONS_TOPIC


def test_the_lag_is_zero_when_a_batch_of_several_was_read(broker: Broker) -> None:
    with closing(KafkaLog(config(broker), max_poll_records=2)) as log:
        produce(broker, *(b"%d" % n for n in range(7)))
        produce(broker, b"f", topic=FEEDBACK_TOPIC)
        start(log, START)
        poll(log, 2)
        lags = log.lags()
        assert lags is None or sum(lags.values()) in range(1, 7)
        poll(log, 6)

        assert log.lags() == {FIRST: 0, (FEEDBACK_TOPIC, 0): 0}


def test_a_record_of_three_megabytes_arrives(broker: Broker) -> None:
    with closing(KafkaLog(config(broker))) as log:
        produce(broker, b"x" * 3_000_000)
        start(log, START)

        assert [len(record.value) for record in poll(log, 1)] == [3_000_000]


def test_a_paused_log_brings_nothing_and_then_all_of_it(broker: Broker) -> None:
    with closing(KafkaLog(config(broker))) as log:
        start(log, START)
        log.pause()
        produce(broker, *(b"%d" % n for n in range(7)))

        assert [log.poll(0.5).records for _ in range(2)] == [[], []]
        log.resume()
        assert [record.offset for record in poll(log, 7)] == list(range(7))


def test_large_records_come_few_at_a_time(broker: Broker) -> None:
    with closing(KafkaLog(config(broker))) as log:
        produce(broker, *(b"x" * 2_000_000 for _ in range(12)))
        start(log, START)
        sizes: list[int] = []
        while sum(sizes) < 12:
            sizes.append(len(log.poll(1.0).records))

        first = next(at for at, size in enumerate(sizes) if size)
        assert all(size <= 4 for size in sizes[first + 1 :])


def test_records_arrive_with_their_checksums_looked_at(broker: Broker) -> None:
    with closing(KafkaLog(config(broker), check_crcs="always")) as log:
        produce(broker, b"x")
        start(log, START)

        assert [record.value for record in poll(log, 1)] == [b"x"]


@needs_kafka
def test_a_position_that_was_deleted_goes_on_at_the_earliest_and_says_so(tmp_path: Path) -> None:
    from kafka import TopicPartition
    from kafka.admin import KafkaAdminClient

    with kafka(tmp_path) as broker, closing(KafkaLog(config(broker))) as log:
        produce(broker, *(b"%d" % n for n in range(7)))
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        admin.delete_records({TopicPartition(*FIRST): 4})
        admin.close()
        start(log, START)

        fetched = PollResult()
        while not fetched.restarted:
            fetched = log.poll(0.2)
        assert fetched.restarted == [FIRST]
        assert [record.offset for record in poll(log, 3)] == [4, 5, 6]


@needs_kafka
def test_a_position_beyond_the_end_goes_on_at_the_earliest_and_says_so(tmp_path: Path) -> None:
    with kafka(tmp_path) as broker, closing(KafkaLog(config(broker))) as log:
        produce(broker, b"0", b"1")
        start(log, {**START, FIRST: 50})

        fetched = PollResult()
        while not fetched.restarted:
            fetched = log.poll(0.2)
        assert fetched.restarted == [FIRST]
        assert [record.offset for record in poll(log, 2)] == [0, 1]


def test_topics_can_be_ensured_by_several_at_once_and_keep_their_ids(broker: Broker) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ensure_topics(config(broker, partitions=3)), range(4)))

    assert set(answers[0]) == set(ALL_TOPICS)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][FEEDBACK_TOPIC].partitions == (0, 1, 2)


def test_a_topic_that_is_created_again_has_another_id(broker: Broker) -> None:
    from kafka.admin import KafkaAdminClient

    before = ensure_topics(config(broker))
    admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    admin.delete_topics([INTERACTIONS_TOPIC])
    admin.close()
    with TopicAdmin(config(broker)) as topics:
        while INTERACTIONS_TOPIC in topics.describe():
            time.sleep(0.1)
        after = topics.ensure()

    assert after[INTERACTIONS_TOPIC].topic_id != before[INTERACTIONS_TOPIC].topic_id
    assert after[FEEDBACK_TOPIC] == before[FEEDBACK_TOPIC]


def test_nobody_at_the_address_is_an_error_within_the_timeout() -> None:
    nowhere = BrokerConfig(bootstrap=f"127.0.0.1:{free_port()}", request_timeout_s=1)

    with pytest.raises(ServiceUnavailable, match="reach a broker"):
        KafkaLog(nowhere)
