"""What the ledger remembers."""

import shutil
import sqlite3
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from onlinerl.errors import LeaseHeld
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.trainer.bookkeeping.database import Database
from onlinerl.trainer.bookkeeping.ledger import Cycle, Ledger
from tests.trainer.builders import START, plan, row, rows_with


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "ledger.sqlite")


@pytest.fixture
def store(tmp_path: Path) -> DeltaStore:
    made = DeltaStore(str(tmp_path / "store"))
    made.create()
    return made


@pytest.fixture
def lease(store: DeltaStore) -> Iterator[Lease]:
    with Lease(store, name="train", ttl_s=60.0) as held:
        yield held


def take_over(store: DeltaStore, *, min_fence: int = 0) -> Lease:
    """Another machine takes the lease from a holder that was silent for too long."""
    later = Lease(
        store, name="train", ttl_s=60.0, min_fence=min_fence, clock=lambda: time.time() + 61
    )
    return later.take()


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database, clock=lambda: 42.0)


def test_a_plan_is_read_back_as_it_was(ledger: Ledger, lease: Lease) -> None:
    planned = plan(rows_with([1.0, 0.1 + 0.2]), baselines={"acme": 1 / 3})
    cycle = ledger.add(planned, lease=lease)

    assert ledger.unfinished("assistant") == cycle
    assert ledger.cycle(cycle.number).plan == planned
    assert cycle.cycle_id == "assistant-c00001-20261101t120000"


def test_only_a_registered_cycle_uses_its_rows_up(ledger: Ledger, lease: Lease) -> None:
    failed = ledger.add(plan([row(0), row(1)]), lease=lease)
    ledger.mark_failed(failed, reason="no signal", lease=lease)
    assert ledger.trained_rows() == []

    done = ledger.add(plan([row(1), row(2)]), lease=lease)
    ledger.mark_trained(done, lease=lease)
    assert ledger.trained_rows() == []

    ledger.mark_registered(done, version=3, baselines={"acme": 0.5}, lease=lease)
    assert ledger.trained_rows() == [("i0001", 0), ("i0002", 0)]
    assert ledger.unfinished("assistant") is None
    assert ledger.cycle(done.number).version == 3
    assert ledger.baselines("assistant") == {"acme": 0.5}


def test_a_row_is_never_used_up_twice_and_nothing_is_written_then(
    ledger: Ledger, lease: Lease
) -> None:
    first, second = (ledger.add(plan([row(0), row(n)]), lease=lease) for n in (1, 2))
    ledger.mark_registered(first, version=2, baselines={}, lease=lease)

    with pytest.raises(sqlite3.IntegrityError):
        ledger.mark_registered(second, version=3, baselines={}, lease=lease)

    assert ledger.cycle(second.number).status == "planned"
    assert ledger.trained_rows() == [("i0000", 0), ("i0001", 0)]


def test_attempts_are_counted(ledger: Ledger, lease: Lease) -> None:
    cycle = ledger.add(plan(), lease=lease)
    ledger.begin_attempt(cycle, lease=lease)
    ledger.begin_attempt(cycle, lease=lease)

    assert ledger.cycle(cycle.number).attempts == 2


def test_policies_do_not_see_each_others_cycles(ledger: Ledger, lease: Lease) -> None:
    ledger.add(plan(policy="other"), lease=lease)

    assert ledger.unfinished("assistant") is None
    assert ledger.last_finished("assistant") is None
    assert ledger.unfinished("other") is not None


def test_the_last_finished_cycle_says_when_and_how(ledger: Ledger, lease: Lease) -> None:
    assert ledger.last_finished("assistant") is None
    ledger.mark_failed(ledger.add(plan(), lease=lease), reason="x", lease=lease)
    last = ledger.last_finished("assistant")

    assert last is not None
    assert (last.finished_at, last.status) == (42.0, "failed")


def assert_refused(ledger: Ledger, cycle: Cycle, *, lease: Lease) -> None:
    with pytest.raises(LeaseHeld):
        ledger.begin(lease=lease)
    with pytest.raises(LeaseHeld):
        ledger.add(plan(), lease=lease)
    with pytest.raises(LeaseHeld):
        ledger.begin_attempt(cycle, lease=lease)
    with pytest.raises(LeaseHeld):
        ledger.mark_trained(cycle, lease=lease)
    with pytest.raises(LeaseHeld):
        ledger.mark_failed(cycle, reason="x", lease=lease)
    with pytest.raises(LeaseHeld):
        ledger.mark_registered(cycle, version=2, baselines={}, lease=lease)
    assert ledger.count() == 1
    assert ledger.cycle(cycle.number) == cycle
    assert ledger.trained_rows() == []


def test_nothing_is_written_without_the_lease(store: DeltaStore, ledger: Ledger) -> None:
    with Lease(store, name="train", ttl_s=60.0) as lease:
        cycle = ledger.add(plan([row(0)]), lease=lease)

    assert_refused(ledger, cycle, lease=lease)


def test_a_holder_that_was_frozen_and_overtaken_writes_nothing(
    store: DeltaStore, ledger: Ledger, lease: Lease
) -> None:
    """By its own clock it still holds the lease, as after a pause of its whole machine."""
    cycle = ledger.add(plan([row(0)]), lease=lease)
    successor = take_over(store)
    ledger.begin(lease=successor)
    lease.check()

    with pytest.raises(LeaseHeld, match=r"\(fence 1\): the ledger was written under fence 2"):
        ledger.mark_trained(cycle, lease=lease)
    assert_refused(ledger, cycle, lease=lease)
    ledger.mark_trained(cycle, lease=successor)


def test_a_ledger_that_knows_a_higher_fence_than_the_tables_is_written_again(
    store: DeltaStore, ledger: Ledger
) -> None:
    """The tables were created again: without `min_fence` no trainer could write any more."""
    last = take_over(store, min_fence=8)
    ledger.begin(lease=last)
    shutil.rmtree(store.root)
    store.create()

    with (
        Lease(store, name="train", ttl_s=60.0) as behind,
        pytest.raises(LeaseHeld, match="fence 9; run the trainer again"),
    ):
        ledger.begin(lease=behind)
    floor = ledger.highest_fence("train")
    with Lease(store, name="train", ttl_s=60.0, min_fence=floor) as ahead:
        assert (floor, ahead.fence) == (9, 10)
        ledger.add(plan([row(0)]), lease=ahead)


def test_a_file_that_held_the_leases_keeps_their_fences(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute(
            "CREATE TABLE leases (name TEXT PRIMARY KEY, fence INTEGER NOT NULL, host TEXT,"
            " pid INTEGER, started TEXT, taken_at REAL, seen_at REAL)"
        )
        connection.execute("INSERT INTO leases VALUES ('train', 7, 'h', 1, '1', 1.0, 1.0)")
    connection.close()

    for _ in range(2):
        assert Ledger(Database(file)).highest_fence("train") == 7
    assert Ledger(Database(file)).highest_fence("other") == 0


def test_a_ledger_that_begins_anew_does_not_repeat_the_names_of_the_lost_one(
    tmp_path: Path, lease: Lease
) -> None:
    names = set()
    for name, planned_at in (("lost", START), ("new", START + timedelta(hours=1))):
        database = Database(tmp_path / name)
        cycle = Ledger(database).add(plan(planned_at=planned_at), lease=lease)
        names.add(cycle.cycle_id)

    assert len(names) == 2
