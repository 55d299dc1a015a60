"""What a tick does, with a training process that is a function."""

import signal
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from onlinerl.errors import ServiceUnavailable
from onlinerl.registry.memory_registry import MemoryRegistry
from onlinerl.trainer.config import ScheduleConfig
from onlinerl.trainer.cycle.run import run_cycle
from onlinerl.trainer.schedule.child import LATE
from onlinerl.trainer.schedule.exit_codes import EXIT_FAILED, EXIT_LEASE_HELD, EXIT_NOTHING_TO_DO
from onlinerl.trainer.schedule.loop import Schedule, write_configuration
from tests.trainer.builders import row
from tests.trainer.cycle.test_run import Killed, World, killed_at, world

__all__ = ["world"]  # a fixture of the cycle's tests


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def schedule(
    world: World,
    clock: Clock,
    *,
    run_job: Callable[[Callable[[], None]], int] | None = None,
    **changes: object,
) -> tuple[Schedule, list[int]]:
    """A schedule whose job runs a cycle here, and the list of its exit codes."""
    codes: list[int] = []

    def job(alive: Callable[[], None]) -> int:
        codes.append(0 if run_job is None else run_job(alive))
        if run_job is None:
            world.run()
        return codes[-1]

    config = ScheduleConfig.model_validate({"interval_s": 100.0, "retry_after_s": 10.0} | changes)
    ledger = world.ledger
    ledger._clock = clock
    parts = world.parts(ledger=ledger)
    return Schedule(parts, config=config, run_job=job, clock=clock), codes


def test_a_cycle_runs_when_it_is_due_and_not_before(world: World, clock: Clock) -> None:
    tested, codes = schedule(world, clock, wait_for_verdict=False)
    tested.tick()
    world.source.rows += [row(n, reward=float(n % 2)) for n in range(20, 26)]
    assert len(codes) == 1

    tested.tick()
    assert len(codes) == 1
    assert "due in" in tested.activity.waiting_for


def test_too_few_rows_start_no_process(world: World, clock: Clock) -> None:
    world.source.rows = world.source.rows[:3]
    tested, codes = schedule(world, clock)
    tested.tick()

    assert codes == []
    assert "3 labelled rows" in tested.activity.waiting_for
    assert tested.ready() is None


def test_while_somebody_else_trains_no_process_is_started(world: World, clock: Clock) -> None:
    tested, codes = schedule(world, clock)
    tested._lease_held_by = lambda: "the lease is held by process 7"
    tested.tick()

    assert codes == []
    assert tested.activity.waiting_for == "the lease is held by process 7"


def test_a_candidate_without_a_verdict_is_waited_for(world: World, clock: Clock) -> None:
    world.run()
    world.source.rows += [row(n, reward=float(n % 2)) for n in range(20, 26)]
    clock.now = 4e9
    tested, codes = schedule(world, clock)
    tested.tick()
    assert codes == []
    assert "version 2 waits for its verdict" in tested.activity.waiting_for

    world.registry.tags[2]["verdict"] = "refused"
    tested.tick()
    assert codes == [0]


def test_an_unfinished_cycle_is_finished_whatever_the_interval_says(
    world: World, clock: Clock
) -> None:
    with pytest.raises(Killed):
        world.run(fault=killed_at("trained"))
    tested, codes = schedule(world, clock)
    tested.tick()

    assert codes == [0]
    assert world.ledger.cycle(1).status == "registered"


def test_a_process_that_fails_is_tried_again_after_a_pause(world: World, clock: Clock) -> None:
    tested, codes = schedule(world, clock, run_job=lambda alive: 1)
    tested.tick()
    tested.tick()
    assert codes == [1]

    clock.now += 11
    tested.tick()
    assert codes == [1, 1]


def test_a_registry_that_is_away_makes_it_unready_and_not_dead(world: World, clock: Clock) -> None:
    class Away(MemoryRegistry):
        def check(self) -> None:
            raise ServiceUnavailable("the registry is away")

    there = world.registry
    world.registry = Away()
    tested, codes = schedule(world, clock)
    tested.tick()
    assert tested.ready() == "the registry is away"

    world.registry = there
    tested, codes = schedule(world, clock)
    tested.tick()
    assert tested.ready() is None
    assert codes == [0]


def test_looks_that_keep_failing_are_counted_and_further_apart(
    world: World, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryRegistry):
        def check(self) -> None:
            looks.append(clock.now - start)
            raise ServiceUnavailable("the registry is away")

    looks: list[float] = []
    start, there = clock.now, world.registry
    world.registry = Away()
    tested, codes = schedule(world, clock, check_every_s=10.0)
    before = REGISTRY.get_sample_value("onlinerl_trainer_tick_faults_total") or 0.0
    for _ in range(25):
        tested.tick()
        clock.now += 10

    assert looks == [0, 10, 30, 70, 130, 190]
    assert REGISTRY.get_sample_value("onlinerl_trainer_tick_faults_total") == before + 6
    assert caplog.text.count("the registry is away") == 1
    assert tested.ready() == "the registry is away"

    world.registry = there
    tested._parts = replace(tested._parts, registry=there)
    tested.tick()
    assert codes == [0]
    assert tested.ready() is None


def test_an_unexpected_error_does_not_stop_the_clock(world: World, clock: Clock) -> None:
    def broken(alive: Callable[[], None]) -> int:
        raise ZeroDivisionError

    tested, _ = schedule(world, clock, run_job=broken)
    tested.tick()

    assert tested.ready() == "an unexpected error, see the log"


def test_silence_is_unhealthy_and_a_long_training_is_not(world: World, clock: Clock) -> None:
    def long(alive: Callable[[], None]) -> int:
        clock.now += 10_000
        assert tested.ready() is not None
        alive()
        assert tested.ready() is None
        return 0

    tested, codes = schedule(world, clock, run_job=long)
    tested.tick()
    assert codes == [0]

    clock.now += 61 + 4 * 30
    assert "the last look was" in (tested.ready() or "")


def test_a_lease_held_elsewhere_is_an_error_of_the_job_only(world: World, clock: Clock) -> None:
    held = world.lease()
    done = threading.Event()
    with held:
        tested, _ = schedule(world, clock)
        tested.tick()
        assert "the lease 'train' is held" in (tested.ready() or "")
        run_cycle(world.parts(), lease=held)
        done.set()

    assert world.ledger.count() == 1


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, "stopped"),
        (-signal.SIGTERM, "stopped"),
        (EXIT_NOTHING_TO_DO, "nothing_to_do"),
        (EXIT_LEASE_HELD, "lease_held"),
        (EXIT_FAILED, "failed"),
        (LATE, "failed"),
        (-signal.SIGKILL, "failed"),
    ],
)
def test_only_what_went_wrong_is_counted_as_failed(
    world: World, clock: Clock, code: int, outcome: str
) -> None:
    def count(name: str) -> float:
        labels = {"outcome": name}
        return REGISTRY.get_sample_value("onlinerl_trainer_cycles_total", labels) or 0.0

    before = {name: count(name) for name in ("failed", outcome)}
    tested, _ = schedule(world, clock, run_job=lambda alive: code)
    tested.tick()

    assert count(outcome) == before[outcome] + 1
    assert count("failed") == before["failed"] + (outcome == "failed")


def test_the_settings_of_the_training_process_are_for_its_owner_alone(tmp_path: Path) -> None:
    left_by_an_earlier_one = tmp_path / "schedule-settings.json"
    left_by_an_earlier_one.write_text("old")
    left_by_an_earlier_one.chmod(0o644)
    file = write_configuration(tmp_path, "{}")

    assert file.read_text() == "{}"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
