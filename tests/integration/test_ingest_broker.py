"""`onlinerl ingest` as a process of its own, against real brokers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from onlinerl.ingest.writer import STEPS
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.kafka_topics import ensure_topics
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, INTERACTIONS_TOPIC
from onlinerl.rollout_store.store import DeltaStore
from tests.brokers import Broker, free_port, kafka, needs_kafka, tansu
from tests.events import feedback, interaction

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

WAIT_S = 60.0
COMMAND = (sys.executable, "-m", "onlinerl.cli")


@pytest.fixture(params=["tansu", pytest.param("kafka", marks=needs_kafka)])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with {"tansu": tansu, "kafka": kafka}[request.param](tmp_path) as broker:
        yield broker


@dataclass
class Pipeline:
    """A configuration, its broker, and what was sent."""

    folder: Path
    broker: Broker
    health_port: int = field(default_factory=free_port)
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.folder / "model"
        model.mkdir()
        self.config = self.folder / "onlinerl.toml"
        self.config.write_text(
            f"""
            data_dir = "data of it"
            policy.base_model = {json.dumps(str(model))}
            broker.bootstrap = "{self.broker.bootstrap}"
            broker.request_timeout_s = 2
            ingest.health_port = {self.health_port}
            ingest.max_batch_age_s = 0.1
            ingest.max_batch_rows = 20
            ingest.poll_timeout_s = 0.1
            """
        )
        self.store = DeltaStore(str(self.folder / "data of it" / "store"))
        self.settings = BrokerConfig(bootstrap=self.broker.bootstrap, request_timeout_s=5)

    def start(self, **environment: str) -> "subprocess.Popen[bytes]":
        """`onlinerl ingest`, running."""
        process = subprocess.Popen(
            [*COMMAND, "ingest", "--config", str(self.config)],
            env=os.environ | environment,
        )
        self.processes.append(process)
        return process

    def send(self, *numbers: int, poison: bool = False) -> None:
        """Interactions with feedback, acknowledged by the broker when this returns."""
        from kafka import KafkaProducer

        ensure_topics(self.settings)
        producer = KafkaProducer(bootstrap_servers=self.broker.bootstrap, linger_ms=5)
        for number in numbers:
            event = interaction(f"i{number}").model_dump_json().encode()
            producer.send(INTERACTIONS_TOPIC, event, key=b"s1")
            about = feedback(f"f{number}", interaction_id=f"i{number}").model_dump_json().encode()
            producer.send(FEEDBACK_TOPIC, about, key=b"s1")
            if poison:
                producer.send(INTERACTIONS_TOPIC, b"poison %d" % number, key=b"s1")
        producer.flush(30)
        producer.close(5)

    def stored(self, table: str, column: str) -> Counter[object]:
        """How often each value is stored; empty before the table exists."""
        if not self.store.exists(table):
            return Counter()
        return Counter(self.store.dataset(table).to_table([column])[column].to_pylist())

    def num_rows(self) -> int:
        """How many interaction rows are stored."""
        return self.stored("interactions", "interaction_id").total()

    def has(self, *numbers: int) -> bool:
        """Whether exactly these interactions and their feedback are stored, once each."""
        return self.stored("interactions", "interaction_id") == {
            f"i{n}": 1 for n in numbers
        } and self.stored("feedback", "feedback_id") == {f"f{n}": 1 for n in numbers}

    def readiness(self) -> tuple[int, str]:
        """Status and body of `/health/ready`; status 0 while nothing listens."""
        try:
            with urlopen(f"http://127.0.0.1:{self.health_port}/health/ready", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except URLError as error:
            body = getattr(error, "read", bytes)()
            return getattr(error, "code", 0), body.decode()

    def stop(self) -> None:
        """Kill what runs."""
        for process in self.processes:
            process.kill()
            process.wait(timeout=30)


@pytest.fixture
def pipeline(broker: Broker, tmp_path: Path) -> Iterator[Pipeline]:
    pipeline = Pipeline(tmp_path, broker)
    yield pipeline
    pipeline.stop()


def wait_until(holds: Callable[..., bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.1)


def test_events_arrive_and_sigterm_ends_it_cleanly(pipeline: Pipeline) -> None:
    process = pipeline.start()
    wait_until(lambda: pipeline.readiness()[0] == 200, "ready")
    pipeline.send(*range(50))
    wait_until(lambda: pipeline.has(*range(50)), "50 rows")
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=30) == 0


def test_once_ends_when_the_log_was_read(pipeline: Pipeline) -> None:
    pipeline.send(*range(30), poison=True)
    command = [*COMMAND, "ingest", "--once", "--config", str(pipeline.config)]
    subprocess.run(command, check=True, timeout=WAIT_S)

    assert pipeline.has(*range(30))
    assert pipeline.stored("dead_letters", "payload") == {b"poison %d" % n: 1 for n in range(30)}


@pytest.mark.parametrize("step", STEPS)
def test_kill_9_at_every_step_loses_and_doubles_nothing(pipeline: Pipeline, step: str) -> None:
    for visit in (1, 2):
        pipeline.send(*range(30 * visit - 30, 30 * visit), poison=True)
        process = pipeline.start(ONLINERL_FAULT=f"{step}:{visit}")
        assert process.wait(timeout=WAIT_S) == -signal.SIGKILL
    pipeline.start()
    wait_until(lambda: pipeline.has(*range(60)), "60 rows, once each")

    poison = {b"poison %d" % n: 1 for n in range(60)}
    assert pipeline.stored("dead_letters", "payload") == poison


def test_kill_9_at_random_moments_under_traffic_loses_and_doubles_nothing(
    pipeline: Pipeline,
) -> None:
    sent = 0
    for round_number in range(3):
        process = pipeline.start()
        for _ in range(8):
            pipeline.send(*range(sent, sent + 10))
            sent += 10
        before = 80 * round_number
        wait_until(lambda least=before: pipeline.num_rows() > least, "some rows of this round")
        process.kill()
        process.wait(timeout=30)
    pipeline.start()

    wait_until(lambda: pipeline.has(*range(sent)), f"{sent} rows, once each")


def test_a_frozen_broker_is_said_and_outlived(pipeline: Pipeline) -> None:
    process = pipeline.start()
    pipeline.send(*range(5))
    wait_until(lambda: pipeline.has(*range(5)), "5 rows")
    pipeline.broker.freeze()
    wait_until(lambda: pipeline.readiness()[0] == 503, "not ready")
    pipeline.broker.thaw()
    wait_until(lambda: pipeline.readiness()[0] == 200, "ready again")
    pipeline.send(*range(5, 9))
    wait_until(lambda: pipeline.has(*range(9)), "9 rows")

    assert process.poll() is None


@needs_kafka
def test_a_killed_kafka_that_kept_its_data_is_outlived(tmp_path: Path) -> None:
    with kafka(tmp_path) as broker:
        pipeline = Pipeline(tmp_path, broker)
        try:
            process = pipeline.start()
            pipeline.send(*range(5))
            wait_until(lambda: pipeline.has(*range(5)), "5 rows")
            broker.kill()
            wait_until(lambda: pipeline.readiness()[0] == 503, "not ready")
            broker.start()
            pipeline.send(*range(5, 9))
            wait_until(lambda: pipeline.has(*range(9)), "9 rows")

            assert process.poll() is None
        finally:
            pipeline.stop()


@pytest.mark.parametrize("shipped_again", [False, True], ids=["shorter", "longer than before"])
def test_a_broker_that_comes_back_empty_stalls_nothing_and_skips_nothing(
    tmp_path: Path, shipped_again: bool
) -> None:
    old, new = range(20), range(20, 25)
    with tansu(tmp_path) as broker:
        pipeline = Pipeline(tmp_path, broker)
        try:
            process = pipeline.start()
            pipeline.send(*old)
            wait_until(lambda: pipeline.has(*old), "20 rows")
            broker.restart()
            pipeline.send(*([*new, *old] if shipped_again else new))
            wait_until(lambda: pipeline.has(*old, *new), "25 rows, once each")

            assert process.poll() is None
        finally:
            pipeline.stop()


def test_a_broker_that_came_back_empty_while_ingest_was_down_skips_nothing(tmp_path: Path) -> None:
    with tansu(tmp_path) as broker:
        pipeline = Pipeline(tmp_path, broker)
        try:
            pipeline.send(*range(3))
            process = pipeline.start()
            wait_until(lambda: pipeline.has(*range(3)), "3 rows")
            process.kill()
            process.wait(timeout=30)
            broker.restart()
            pipeline.send(*reversed(range(9)))
            pipeline.start()
            wait_until(lambda: pipeline.has(*range(9)), "9 rows, once each")
        finally:
            pipeline.stop()


def test_a_second_ingest_takes_over_and_the_first_says_so(pipeline: Pipeline) -> None:
    first = pipeline.start()
    pipeline.send(*range(5))
    wait_until(lambda: pipeline.has(*range(5)), "5 rows")
    pipeline.config.write_text(
        pipeline.config.read_text().replace(str(pipeline.health_port), str(free_port()))
    )
    second = pipeline.start()
    for number in range(5, 200):
        pipeline.send(number)
        if first.poll() is not None:
            break

    assert first.wait(timeout=30) == 1
    wait_until(lambda: pipeline.has(*range(number + 1)), "every row once")
    assert second.poll() is None
