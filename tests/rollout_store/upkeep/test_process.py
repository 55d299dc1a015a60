"""The process `onlinerl maintain` and its lease."""

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from onlinerl.errors import LeaseHeld, ServiceUnavailable
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.rollout_store.upkeep.config import MaintenanceConfig, RetentionConfig
from onlinerl.rollout_store.upkeep.process import LEASE, Maintainer
from tests.rollout_store.people import People


class Clock:
    def __init__(self) -> None:
        self.at = 1_000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    for number in range(3):
        people.says(f"i{number}", user="ada", session="s")
    return people


def maintainer(people: People, **changes: object) -> Maintainer:
    config = MaintenanceConfig(min_small_files=2, interval_s=0.01)
    return Maintainer(people.store, config=config, retention=RetentionConfig(), **changes)  # type: ignore[arg-type]


def test_a_pass_compacts_and_gives_the_lease_back(people: People) -> None:
    done = maintainer(people).run_pass(threading.Event())

    (interactions,) = [each for each in done if each.table == "interactions"]
    assert interactions.compacted.num_files_before == 3
    with Lease(people.store, name=LEASE, ttl_s=1):
        pass


def test_a_pass_ends_between_tables_when_it_is_stopped(people: People) -> None:
    stop = threading.Event()
    stop.set()

    assert maintainer(people).run_pass(stop) == []
    with Lease(people.store, name=LEASE, ttl_s=1):
        pass


def test_a_second_process_waits_and_is_ready(people: People) -> None:
    stop = threading.Event()

    def now() -> datetime:
        return datetime.now(UTC)

    second = maintainer(people, now=now)
    with Lease(people.store, name=LEASE, ttl_s=600):
        with pytest.raises(LeaseHeld):
            second.run_pass(stop)
        thread = threading.Thread(target=second.run, args=(stop,))
        thread.start()
        assert second.ready() is None
        stop.set()
        thread.join(timeout=30)

    assert len(people.store.delta("interactions").file_uris()) == 3


def test_a_failed_pass_makes_the_process_unready(people: People) -> None:
    stop = threading.Event()

    class Away(DeltaStore):
        def create(self) -> None:
            stop.set()
            raise ServiceUnavailable("the storage is away")

    broken = Maintainer(
        Away(people.store.root),
        config=MaintenanceConfig(interval_s=0.01),
        retention=RetentionConfig(),
    )
    broken.run(stop)

    assert broken.ready() == "the storage is away"


class Stop(threading.Event):
    """Is set after a number of waits, and records their timeouts."""

    def __init__(self, *, after_waits: int) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self._after_waits = after_waits

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        if len(self.waits) == self._after_waits:
            self.set()
        return self.is_set()


def test_repeated_faults_back_off_and_are_logged_once(
    people: People, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(DeltaStore):
        def create(self) -> None:
            raise ServiceUnavailable("the storage is away")

    config = MaintenanceConfig(interval_s=600.0)
    broken = Maintainer(Away(people.store.root), config=config, retention=RetentionConfig())
    stop = Stop(after_waits=4)
    broken.run(stop)

    assert stop.waits == [600.0, 1200.0, 1800.0, 1800.0]
    assert caplog.text.count("the storage is away") == 1
    assert broken.ready() == "the storage is away"


def test_a_silent_process_is_not_ready(people: People) -> None:
    clock = Clock()
    quiet = maintainer(people, clock=clock)

    assert quiet.ready() is None
    clock.at += 3_601
    assert quiet.ready() == "the last sign of life was 3601 s ago"
