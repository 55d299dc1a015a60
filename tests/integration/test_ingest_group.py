"""Several `onlinerl ingest` in one consumer group, against Apache Kafka."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.brokers import free_port, kafka, needs_kafka
from tests.integration.ingest_pipeline import WAIT_S, Pipeline, wait_until

NUM_RECORDS = int(os.environ.get("ONLINERL_TEST_RECORDS", "10000"))
"""Records of the long log; CONTRIBUTING.md says when to give it more."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), needs_kafka]

IN_A_GROUP = """
            broker.partitions = 4
            ingest.mode = "group"
            ingest.session_timeout_s = 6
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    # A group waits 3 s for more members before its first assignment unless it is told not to.
    with kafka(tmp_path, None, "group.initial.rebalance.delay.ms=0") as broker:
        pipeline = Pipeline(tmp_path, broker, more=IN_A_GROUP, partitions=4)
        yield pipeline
        pipeline.stop()


@contextmanager
def traffic(pipeline: Pipeline) -> Iterator[list[int]]:
    """Interactions, feedback and poison without a pause; the list grows by what is acknowledged."""
    sent: list[int] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            numbers = range(len(sent), len(sent) + 40)
            pipeline.send(*numbers, poison=True)
            sent.extend(numbers)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join(60)


def has_everything(pipeline: Pipeline, sent: list[int]) -> bool:
    poison = {b"poison %d" % n: 1 for n in sent}
    return pipeline.has(*sent) and pipeline.stored("dead_letters", "payload") == poison


@pytest.mark.slow
def test_members_come_go_and_are_killed_under_load_and_every_row_is_stored_once(
    pipeline: Pipeline,
) -> None:
    with traffic(pipeline) as sent:
        first = pipeline.start("--set", f"ingest.health_port={free_port()}")
        wait_until(lambda: pipeline.num_rows() > 0, "rows by the first")
        second = pipeline.start("--set", f"ingest.health_port={free_port()}")
        before = pipeline.num_rows()
        wait_until(lambda: pipeline.num_rows() > before + 400, "rows by two")
        first.kill()
        first.wait(timeout=60)
        between = pipeline.num_rows()
        wait_until(lambda: pipeline.num_rows() > between + 400, "rows after a kill")
        pipeline.start("--set", f"ingest.health_port={free_port()}")
        later = pipeline.num_rows()
        wait_until(lambda: pipeline.num_rows() > later + 400, "rows by two again")
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=60) == 0
    wait_until(lambda: has_everything(pipeline, sent), f"{len(sent)} rows, once each")


def test_two_members_share_the_partitions_and_a_third_finds_the_work_done(
    pipeline: Pipeline,
) -> None:
    ports = [free_port(), free_port()]
    processes = [pipeline.start("--set", f"ingest.health_port={port}") for port in ports]

    def shares() -> list[float]:
        return [pipeline.metric("onlinerl_ingest_partitions", port=port) for port in ports]

    wait_until(lambda: shares() == [4.0, 4.0], "4 of 8 partitions each")
    pipeline.send(*range(200), poison=True)
    wait_until(lambda: has_everything(pipeline, list(range(200))), "200 rows, once each")
    read = [pipeline.metric("onlinerl_ingest_records_total", port=port) for port in ports]
    once = pipeline.start("--once", "--set", "ingest.health_port=0")

    assert all(read)
    assert sum(read) == 600
    assert once.wait(timeout=90) == 0
    assert has_everything(pipeline, list(range(200)))
    assert [process.poll() for process in processes] == [None, None]


@pytest.mark.slow
@pytest.mark.timeout(600 + NUM_RECORDS // 500)
def test_a_long_log_is_stored_once_whatever_dies_on_the_way(pipeline: Pipeline) -> None:
    """Half interactions, half feedback; a member is killed, one joins, the broker is killed."""
    num_rows = NUM_RECORDS // 2
    for start in range(0, num_rows, 5000):
        pipeline.send(*range(start, min(start + 5000, num_rows)))
    batches = ("ingest.max_batch_rows=2000", "ingest.max_batch_age_s=1")
    options = [word for value in batches for word in ("--set", value)]

    def member() -> "subprocess.Popen[bytes]":
        return pipeline.start(*options, "--set", f"ingest.health_port={free_port()}")

    def stored(share: float) -> None:
        wait_until(
            lambda: (
                pipeline.store.exists("interactions")
                and pipeline.store.dataset("interactions").count_rows() >= share * num_rows
            ),
            f"{share:.0%} of {num_rows} rows",
            timeout_s=WAIT_S + NUM_RECORDS / 1000,
        )

    first = member()
    stored(0.1)
    member()
    stored(0.3)
    first.kill()
    first.wait(timeout=60)
    member()
    stored(0.5)
    pipeline.broker.restart()
    stored(1.0)
    wait_until(
        lambda: pipeline.has(*range(num_rows)),
        f"{NUM_RECORDS} records, once each",
        timeout_s=WAIT_S + NUM_RECORDS / 1000,
    )
