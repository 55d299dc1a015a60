"""What the ledger remembers."""

import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from onlinerl.trainer.bookkeeping.lease import Lease

from onlinerl.errors import LeaseHeld
from onlinerl.trainer.bookkeeping.database import Database
from onlinerl.trainer.bookkeeping.ledger import Ledger
from tests.trainer.builders import START, plan, row, rows_with


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "ledger.sqlite")


@pytest.fixture
def lease(database: Database) -> Iterator[Lease]:
    with Lease(database, name="train", ttl_s=60.0) as held:
        yield held


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


def test_nothing_is_written_without_the_lease(database: Database, ledger: Ledger) -> None:
    with Lease(database, name="train", ttl_s=60.0) as lease:
        cycle = ledger.add(plan([row(0)]), lease=lease)

    with pytest.raises(LeaseHeld):
        ledger.add(plan(), lease=lease)
    with pytest.raises(LeaseHeld):
        ledger.mark_trained(cycle, lease=lease)
    with pytest.raises(LeaseHeld):
        ledger.mark_registered(cycle, version=2, baselines={}, lease=lease)
    assert ledger.cycle(cycle.number).status == "planned"
    assert ledger.trained_rows() == []


def test_a_ledger_that_begins_anew_does_not_repeat_the_names_of_the_lost_one(
    tmp_path: Path,
) -> None:
    names = set()
    for name, planned_at in (("lost", START), ("new", START + timedelta(hours=1))):
        database = Database(tmp_path / name)
        with Lease(database, name="train", ttl_s=60.0) as lease:
            cycle = Ledger(database).add(plan(planned_at=planned_at), lease=lease)
        names.add(cycle.cycle_id)

    assert len(names) == 2
