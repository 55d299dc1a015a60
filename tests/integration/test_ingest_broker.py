"""`onlinerl ingest` as a process of its own, against real brokers."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from onlinerl.ingest.committing.writer import STEPS
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from tests.brokers import Broker, free_port, kafka, needs_kafka, tansu
from tests.integration.ingest_pipeline import COMMAND, WAIT_S, Pipeline, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(params=["tansu", pytest.param("kafka", marks=[needs_kafka, pytest.mark.slow])])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with {"tansu": tansu, "kafka": kafka}[request.param](tmp_path) as broker:
        yield broker


@pytest.fixture
def pipeline(broker: Broker, tmp_path: Path) -> Iterator[Pipeline]:
    pipeline = Pipeline(tmp_path, broker)
    yield pipeline
    pipeline.stop()


def test_events_arrive_and_sigterm_ends_it_cleanly(pipeline: Pipeline) -> None:
    process = pipeline.start()
    wait_until(lambda: pipeline.readiness()[0] == 200, "ready")
    pipeline.send(*range(50))
    wait_until(lambda: pipeline.has(*range(50)), "50 rows")
    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=60) == 0


def test_once_ends_when_the_log_was_read(pipeline: Pipeline) -> None:
    pipeline.send(*range(30), poison=True)
    pipeline.drain()

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
        process.wait(timeout=60)
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


@pytest.mark.slow
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
            process.wait(timeout=60)
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

    assert first.wait(timeout=60) == 1
    wait_until(lambda: pipeline.has(*range(number + 1)), "every row once")
    assert second.poll() is None


def test_a_dead_letter_comes_back_after_a_fix_and_once(pipeline: Pipeline) -> None:
    pipeline.send(*range(3), poison=True)
    once = ("--once", "--set", "ingest.health_port=0")
    small = pipeline.start(*once, "--set", "ingest.vocab_size=5")  # the completions are 7, 8
    assert small.wait(timeout=WAIT_S) == 0
    replay = [*COMMAND, "dead-letters", "replay", "--config", str(pipeline.config)]
    told = [
        subprocess.run(
            [*replay, "--reason", "vocabulary"],
            check=True,
            timeout=WAIT_S,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    ]
    assert pipeline.start(*once).wait(timeout=WAIT_S) == 0

    assert [line.split()[0] for line in told] == ["3", "0"]
    assert pipeline.has(*range(3))
    assert pipeline.stored("dead_letters", "payload").total() == 6


def test_thousands_of_records_are_stored_once_each_by_two_processes_in_turn(
    pipeline: Pipeline,
) -> None:
    pipeline.send(*range(4000))
    options = ("--set", "ingest.max_batch_rows=500", "--set", "ingest.health_port=0")
    first = pipeline.start(*options)
    wait_until(lambda: pipeline.num_rows() > 0, "some rows")
    first.kill()
    first.wait(timeout=60)

    assert pipeline.start("--once", *options).wait(timeout=WAIT_S) == 0
    assert pipeline.has(*range(4000))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted only by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_said_and_nothing_is_lost_when_space_returns(
    tmp_path: Path, small_disk: Path
) -> None:
    with tansu(tmp_path) as broker:
        more = f'store.root = "{small_disk / "store"}"'
        pipeline = Pipeline(tmp_path, broker, more=more)
        pipeline.store = DeltaStore(str(small_disk / "store"))
        try:
            process = pipeline.start()
            pipeline.send(*range(5))
            wait_until(lambda: pipeline.has(*range(5)), "5 rows")
            ballast = small_disk / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            pipeline.send(*range(5, 40), poison=True)
            wait_until(lambda: pipeline.readiness()[0] == 503, "not ready")
            assert "cannot append to table" in pipeline.readiness()[1]
            ballast.unlink()
            wait_until(lambda: pipeline.has(*range(40)), "40 rows, once each")

            poison = {b"poison %d" % n: 1 for n in range(5, 40)}
            assert pipeline.stored("dead_letters", "payload") == poison
            assert process.poll() is None
        finally:
            pipeline.stop()
