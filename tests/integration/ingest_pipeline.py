"""`onlinerl ingest` as a process of its own, with its configuration, its broker and its tables."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import ensure_topics
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, INTERACTIONS_TOPIC
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from tests.brokers import Broker, free_port
from tests.events import feedback, interaction
from tests.waiting import until

WAIT_S = 120.0
COMMAND = (sys.executable, "-m", "onlinerl.cli")


@dataclass
class Pipeline:
    """A configuration, its broker, and what was sent."""

    folder: Path
    broker: Broker
    more: str = ""
    """More lines of the configuration."""
    partitions: int = 1
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
            {self.more}
            """
        )
        self.store = DeltaStore(str(self.folder / "data of it" / "store"))
        self.settings = BrokerConfig(
            bootstrap=self.broker.bootstrap, request_timeout_s=30, partitions=self.partitions
        )

    def start(self, *options: str, **environment: str) -> "subprocess.Popen[bytes]":
        """`onlinerl ingest`, running."""
        process = subprocess.Popen(
            [*COMMAND, "ingest", "--config", str(self.config), *options],
            env=os.environ | environment,
        )
        self.processes.append(process)
        return process

    def drain(self) -> None:
        """`onlinerl ingest --once`: everything that is in the log now is stored."""
        command = [*COMMAND, "ingest", "--once", "--config", str(self.config)]
        subprocess.run(command, check=True, timeout=WAIT_S)

    def send(self, *numbers: int, poison: bool = False) -> None:
        """Interactions with feedback, acknowledged by the broker when this returns."""
        from kafka import KafkaProducer

        ensure_topics(self.settings)
        producer = KafkaProducer(bootstrap_servers=self.broker.bootstrap, linger_ms=5)
        for number in numbers:
            key = b"s%d" % (number % (4 * self.partitions))
            event = interaction(f"i{number}").model_dump_json().encode()
            producer.send(INTERACTIONS_TOPIC, event, key=key)
            about = feedback(f"f{number}", interaction_id=f"i{number}").model_dump_json().encode()
            producer.send(FEEDBACK_TOPIC, about, key=key)
            if poison:
                producer.send(INTERACTIONS_TOPIC, b"poison %d" % number, key=key)
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

    def metric(self, name: str, *, port: int | None = None) -> float:
        """The sum of a metric over its labels; 0 while nothing answers."""
        address = f"http://127.0.0.1:{port or self.health_port}/metrics"
        try:
            with urlopen(address, timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except URLError:
            return 0.0
        samples = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in samples)

    def stop(self) -> None:
        """Kill what runs."""
        for process in self.processes:
            process.kill()
            process.wait(timeout=60)


def wait_until(holds: Callable[..., object], what: str, timeout_s: float = WAIT_S) -> None:
    """Look ten times a second: every look reads tables."""
    until(holds, what=what, timeout_s=timeout_s, every_s=0.1)
