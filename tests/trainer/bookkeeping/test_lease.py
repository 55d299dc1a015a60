"""One holder at a time."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from onlinerl.trainer.bookkeeping.lease import Lease
from onlinerl.trainer.bookkeeping.process_identity import start_time

from onlinerl.errors import LeaseHeld
from onlinerl.trainer.bookkeeping.database import Database


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "ledger.sqlite")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease(database: Database, clock: Clock) -> Lease:
    return Lease(database, name="train", ttl_s=60.0, clock=clock)


def hold_elsewhere(database: Database, *, host: str, pid: int, seen_at: float) -> None:
    with database.write() as connection:
        connection.execute(
            "INSERT INTO leases VALUES ('train', 7, ?, ?, '1', ?, ?)", (host, pid, seen_at, seen_at)
        )


def test_a_held_lease_names_its_holder_and_since_when(database: Database, clock: Clock) -> None:
    message = rf"'train' is held by process {os.getpid()} on {socket.gethostname()} since 1970-"
    with lease(database, clock), pytest.raises(LeaseHeld, match=message), lease(database, clock):
        pass


def test_looking_who_holds_it_takes_nothing(database: Database, clock: Clock) -> None:
    looking = lease(database, clock)

    assert looking.held_by() is None
    with lease(database, clock):
        assert f"held by process {os.getpid()}" in str(looking.held_by())
    assert looking.held_by() is None


def test_leases_of_other_names_are_free(database: Database, clock: Clock) -> None:
    with lease(database, clock), Lease(database, name="other", ttl_s=60.0, clock=clock) as other:
        assert other.fence == 1


def test_a_lease_given_back_is_free_and_its_number_rises(database: Database, clock: Clock) -> None:
    with lease(database, clock) as first:
        pass
    with lease(database, clock) as second:
        assert (first.fence, second.fence) == (1, 2)


def test_a_dead_process_of_this_host_is_taken_over_at_once(
    database: Database, clock: Clock
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    hold_elsewhere(database, host=socket.gethostname(), pid=child.pid, seen_at=clock())

    with lease(database, clock) as taken:
        assert taken.fence == 8


def test_a_number_that_another_process_has_now_is_not_the_holder(
    database: Database, clock: Clock
) -> None:
    # Our own number, but the row's start time is not ours.
    hold_elsewhere(database, host=socket.gethostname(), pid=os.getpid(), seen_at=clock())

    with lease(database, clock) as taken:
        assert taken.fence == 8


def test_a_holder_on_another_host_is_believed_until_it_is_silent(
    database: Database, clock: Clock
) -> None:
    hold_elsewhere(database, host="elsewhere", pid=1, seen_at=clock())
    clock.now += 59
    with pytest.raises(LeaseHeld, match="process 1 on elsewhere"), lease(database, clock):
        pass
    clock.now += 2
    with lease(database, clock) as taken:
        assert taken.fence == 8


def test_a_holder_that_was_overtaken_may_write_nothing_more(
    database: Database, clock: Clock
) -> None:
    with lease(database, clock) as frozen:
        clock.now += 61
        with lease(database, clock) as thief:
            with pytest.raises(LeaseHeld, match="lost the lease"):
                frozen.confirm()
            thief.confirm()


def test_a_holder_that_was_overtaken_gives_nothing_back(database: Database, clock: Clock) -> None:
    first = lease(database, clock)
    with first:
        clock.now += 61
        second = lease(database, clock)
        second.__enter__()
    second.confirm()
    second.__exit__(None, None, None)


def test_a_lease_that_was_given_back_is_no_longer_held(database: Database, clock: Clock) -> None:
    with lease(database, clock) as held:
        pass

    with pytest.raises(LeaseHeld, match="lost the lease"):
        held.confirm()


def test_a_working_holder_is_heard_of(database: Database) -> None:
    with Lease(database, name="train", ttl_s=1.0), database.read() as connection:
        first = connection.execute("SELECT seen_at FROM leases").fetchone()[0]
        deadline = time.monotonic() + 60
        while connection.execute("SELECT seen_at FROM leases").fetchone()[0] == first:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_process_that_does_not_exist_has_no_start_time() -> None:
    assert start_time(2**22 + 1) is None
    assert start_time(os.getpid()) == start_time(os.getpid()) is not None
