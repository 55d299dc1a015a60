"""Real brokers for tests: Tansu from its wheel, and Apache Kafka where a launcher is named.

`ONLINERL_TEST_KAFKA` names a program `kafka-server DIR PORT [key=value ...]` that runs one Apache
Kafka broker in the foreground. Without it the tests that need one are skipped.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from onlinerl.commands.embedded_broker import tansu_command

KAFKA_LAUNCHER = os.environ.get("ONLINERL_TEST_KAFKA", "")

needs_kafka = pytest.mark.skipif(
    not KAFKA_LAUNCHER,
    reason="against Apache Kafka (ONLINERL_TEST_KAFKA names its launcher, see CONTRIBUTING.md)",
)


@dataclass
class Broker:
    """One broker process. `RUNNING -> frozen -> RUNNING` or `RUNNING -> killed -> restarted`."""

    port: int
    command: Sequence[str]
    log: Path
    start_timeout_s: float = 180.0
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def bootstrap(self) -> str:
        """What a client connects to."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until the port accepts a connection."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, start_new_session=True
            )
        try:
            wait_for_port(self.port, process=self.process, timeout_s=self.start_timeout_s)
        except AssertionError as error:
            said = self.log.read_text(errors="replace")[-4000:]
            raise AssertionError(f"{error}; the broker said:\n{said}") from None

    def freeze(self) -> None:
        """Hang: connections stay open and nobody answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Crash, like a lost machine; Tansu loses its log, Apache Kafka keeps it."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait(timeout=60)
            self.process = None

    def restart(self) -> None:
        """Crash and come back on the same port."""
        self.kill()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None, "the broker is not running"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def free_port() -> int:
    """A port that was free a moment ago, and so was the next one, which Kafka's controller takes.

    Below the range from which outgoing connections take theirs.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port


def wait_for_port(port: int, *, process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Return when something listens; fail when the process ends first or the time is up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"{process.args!r} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port} after {timeout_s} s")


@contextlib.contextmanager
def tansu(folder: Path, port: int | None = None) -> Iterator[Broker]:
    """The wheel's broker. Its log lies in memory: after a restart it is empty and ids are new."""
    port = port or free_port()
    command = tansu_command("127.0.0.1", port)
    with _running(Broker(port, command, folder / "tansu.log")) as broker:
        yield broker


@contextlib.contextmanager
def kafka(folder: Path, port: int | None = None, *settings: str) -> Iterator[Broker]:
    """Apache Kafka with its data in `folder`; `settings` are `key=value` server properties."""
    port = port or free_port()
    command = [KAFKA_LAUNCHER, str(folder / "kafka"), str(port), *settings]
    with _running(Broker(port, command, folder / "kafka.log")) as broker:
        yield broker


@contextlib.contextmanager
def _running(broker: Broker) -> Iterator[Broker]:
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


def read_log(bootstrap: str, topic: str, *, timeout_s: float = 60) -> list[bytes]:
    """Every record of a topic; a broker that comes back empty may give it more partitions."""
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)
    try:
        numbers = consumer.partitions_for_topic(topic) or ()
        partitions = [TopicPartition(topic, number) for number in numbers]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        ends = consumer.end_offsets(partitions)
        values: list[bytes] = []
        deadline = time.monotonic() + timeout_s
        while any(consumer.position(one) < end for one, end in ends.items()):
            assert time.monotonic() < deadline, f"{topic} was not read within {timeout_s:g} s"
            for records in consumer.poll(timeout_ms=500).values():
                values += [record.value for record in records]
        return values
    finally:
        consumer.close()
