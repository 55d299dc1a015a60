"""One holder at a time, whatever processes, clocks and the storage do."""

import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from onlinerl.errors import LeaseHeld, ServiceUnavailable
from onlinerl.rollout_store.tables import holder_hint
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.holder_hint import HolderHint
from onlinerl.rollout_store.tables.lease import MAX_SKEW_S, Lease, boot_clock
from tests.waiting import until

HOLD = """
import sys, time
from pathlib import Path
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
with Lease(DeltaStore(sys.argv[1]), name="work", ttl_s=600, hint=Path(sys.argv[2])) as lease:
    print(lease.fence, flush=True)
    time.sleep(600)
"""

RACE = """
import sys, time
from pathlib import Path
from onlinerl.errors import LeaseHeld
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
store, hint, log = DeltaStore(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
won = 0
while won < 8:
    try:
        with Lease(store, name="work", ttl_s=600, hint=hint) as lease:
            lease.confirm()
            with log.open("a") as stream:
                stream.write(f"{lease.fence} begins\\n")
                stream.flush()
                stream.write(f"{lease.fence} ends\\n")
            lease.confirm()
            won += 1
    except LeaseHeld:
        time.sleep(0.002)
"""


class Clock:
    """A wall clock and a stop watch, moved by hand."""

    def __init__(self) -> None:
        self.at = 1_000.0
        self.jumped = 0.0

    def __call__(self) -> float:
        return self.at + self.jumped

    def elapsed(self) -> float:
        return self.at


class FaultyStore(DeltaStore):
    """Appends that fail before or after their commit."""

    fault: str | None = None
    before_commit: Callable[[], None] = staticmethod(lambda: None)

    def append(
        self, table: str, rows: pa.Table, *, transactions: Sequence[Transaction] = ()
    ) -> int:
        if self.fault == "away":
            raise ServiceUnavailable("the storage is away")
        self.before_commit()
        version = super().append(table, rows, transactions=transactions)
        if self.fault == "no answer":
            raise ServiceUnavailable("the storage did not answer")
        return version


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    made = FaultyStore(str(tmp_path / "store"))
    made.create()
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hint(tmp_path: Path) -> Path:
    return tmp_path / "data" / "work.lease"


def lease(
    store: DeltaStore,
    clock: Clock,
    *,
    hint: Path | None = None,
    ttl_s: float = 60.0,
    name: str = "work",
    min_fence: int = 0,
) -> Lease:
    return Lease(
        store,
        name=name,
        ttl_s=ttl_s,
        hint=hint,
        min_fence=min_fence,
        clock=clock,
        elapsed=clock.elapsed,
    )


def kill(held: Lease) -> None:
    """Stands for the end of the process: the kernel frees its lock, and nothing is given back."""
    assert held._hint is not None
    held._hint.release()


def stored_fence(store: DeltaStore, name: str = "work") -> int | None:
    return store.transaction_version("snapshots", f"onlinerl/lease/{name}/fence")


# Taking, renewing, giving back


def test_one_holder_at_a_time(store: DeltaStore, clock: Clock) -> None:
    with (
        lease(store, clock),
        pytest.raises(LeaseHeld, match="'work' is held for another 60 s at most"),
    ):
        lease(store, clock).take()
    with lease(store, clock), lease(store, clock, name="other") as other:
        assert other.fence == 1


def test_every_taking_has_a_higher_fence_and_giving_back_keeps_it(
    store: DeltaStore, clock: Clock
) -> None:
    fences = []
    for _ in range(3):
        with lease(store, clock) as held:
            fences.append(held.fence)
        assert held.fence == 0
        assert stored_fence(store) == fences[-1]
    assert fences == [1, 2, 3]


def test_a_holder_that_died_is_followed_when_its_time_is_up(
    store: DeltaStore, clock: Clock
) -> None:
    dead = lease(store, clock).take()
    clock.at += 59
    with pytest.raises(LeaseHeld, match="for another 1 s"):
        lease(store, clock).take()
    clock.at += 1
    with lease(store, clock) as second:
        assert second.fence == 2
        for use in (dead.renew, dead.confirm, dead.check):
            with pytest.raises(LeaseHeld, match="lost the lease 'work'"):
                use()
        dead.give_back()
        with pytest.raises(LeaseHeld, match="is held"):
            lease(store, clock).take()
        second.confirm()


def test_a_renewal_moves_the_end_and_is_written_when_half_of_it_is_gone(
    store: DeltaStore, clock: Clock
) -> None:
    with lease(store, clock) as held:
        version = store.versions()["snapshots"]
        clock.at += 29
        held.renew()
        held.confirm()
        assert store.versions()["snapshots"] == version
        clock.at += 1
        held.renew()
        held.renew()
        held.confirm()
        assert store.versions()["snapshots"] == version + 1
        clock.at += 50
        with pytest.raises(LeaseHeld, match="for another 10 s"):
            lease(store, clock).take()


def test_a_lease_adds_no_rows_and_no_files(store: DeltaStore, clock: Clock) -> None:
    with lease(store, clock):
        pass
    assert store.dataset("snapshots").count_rows() == 0
    assert store.delta("snapshots").file_uris() == []


def test_a_holder_stops_before_others_whose_clock_is_ahead_may_start(
    store: DeltaStore, clock: Clock
) -> None:
    """Their wall clock is `MAX_SKEW_S` ahead, so that they may start at 55 s of ours."""
    held = lease(store, clock).take()
    clock.at += 60 - MAX_SKEW_S - 0.001
    held.check()
    clock.at += 0.001
    for use in (held.check, held.confirm):
        with pytest.raises(LeaseHeld, match="was not renewed for 55 s"):
            use()


def test_the_holder_counts_from_before_a_slow_commit(store: FaultyStore, clock: Clock) -> None:
    def wait() -> None:
        clock.at += 30

    store.before_commit = wait
    held = lease(store, clock).take()
    clock.at += 24
    held.check()
    held.renew()
    clock.at += 24
    held.check()
    clock.at += 1
    with pytest.raises(LeaseHeld, match="was not renewed for 55 s"):
        held.check()


def test_the_holder_counts_from_before_a_slow_taking(store: FaultyStore, clock: Clock) -> None:
    def wait() -> None:
        clock.at += 30

    store.before_commit = wait
    held = lease(store, clock).take()
    clock.at += 25
    with pytest.raises(LeaseHeld, match="was not renewed for 55 s"):
        held.check()


def test_an_expired_lease_that_nobody_took_can_still_be_renewed(
    store: DeltaStore, clock: Clock
) -> None:
    held = lease(store, clock).take()
    clock.at += 1000
    held.renew()
    held.confirm()
    assert held.fence == stored_fence(store) == 1


def test_confirming_leaves_half_of_the_time(store: DeltaStore, clock: Clock) -> None:
    held = lease(store, clock).take()
    clock.at += 54
    held.confirm()
    clock.at += 54
    held.check()


def test_a_lease_that_was_given_back_is_no_longer_held(store: DeltaStore, clock: Clock) -> None:
    with lease(store, clock) as held:
        pass
    for use in (held.renew, held.confirm, held.check):
        with pytest.raises(LeaseHeld, match="it was given back"):
            use()


def test_what_an_older_release_stored_is_respected(store: DeltaStore, clock: Clock) -> None:
    """It wrote the expiry alone."""
    old = Transaction(app_id="onlinerl/lease/work", version=int(clock() * 1e6) + 10_000_000)
    empty = store.dataset("snapshots").to_table()
    store.append("snapshots", empty, transactions=[old])
    with pytest.raises(LeaseHeld, match="for another 10 s"):
        lease(store, clock).take()
    clock.at += 10
    assert lease(store, clock).take().fence == 1


# The storage


def test_without_tables_the_error_says_so(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(ServiceUnavailable, match="there is no table snapshots"):
        lease(DeltaStore(str(tmp_path / "nothing")), clock).take()
    assert lease(DeltaStore(str(tmp_path / "nothing")), clock).holder() is None


def test_a_taking_that_the_storage_did_not_answer_does_not_lock_its_own_process_out(
    store: FaultyStore, clock: Clock
) -> None:
    held = lease(store, clock)
    store.fault = "no answer"
    with pytest.raises(ServiceUnavailable):
        held.take()
    store.fault = None
    with pytest.raises(LeaseHeld):
        lease(store, clock).take()

    assert held.take().fence == 2
    held.confirm()


def test_a_renewal_that_the_storage_did_not_answer_changes_no_holder(
    store: FaultyStore, clock: Clock
) -> None:
    held = lease(store, clock).take()
    clock.at += 40
    store.fault = "no answer"
    with pytest.raises(ServiceUnavailable):
        held.renew()
    store.fault = None
    held.confirm()


def test_a_lease_that_cannot_be_given_back_expires(
    store: FaultyStore, clock: Clock, hint: Path
) -> None:
    with lease(store, clock):
        store.fault = "away"
    store.fault = None
    with pytest.raises(LeaseHeld):
        lease(store, clock).take()
    clock.at += 60
    assert lease(store, clock).take().fence == 2


def test_a_store_that_is_created_again_is_noticed_and_its_fence_goes_on_from_what_is_known(
    store: DeltaStore, clock: Clock
) -> None:
    """The new table comes to the same fence, and the old holder is still refused."""
    old = lease(store, clock).take()
    shutil.rmtree(store.root)
    store.create()
    with pytest.raises(LeaseHeld, match="so it was created again"):
        old.confirm()

    assert lease(store, clock).take().fence == 1
    old._loss = None
    with pytest.raises(LeaseHeld, match="taken by somebody else, whose fence is 1"):
        old.confirm()
    clock.at += 60
    assert lease(store, clock, min_fence=7).take().fence == 8


# Clocks


def test_an_expiry_that_a_broken_clock_wrote_does_not_lock_everybody_out(
    store: DeltaStore, clock: Clock
) -> None:
    clock.jumped = 8_000 * 365 * 86_400.0
    lease(store, clock).take()
    clock.jumped = 0.0
    with pytest.raises(LeaseHeld, match="for another 60 s"):
        lease(store, clock).take()
    version = store.versions()["snapshots"]
    with pytest.raises(LeaseHeld, match="for another 60 s"):
        lease(store, clock).take()
    assert store.versions()["snapshots"] == version
    clock.at += 60
    assert lease(store, clock).take().fence == 2


def test_a_living_holder_with_a_broken_clock_keeps_its_lease(
    store: DeltaStore, clock: Clock
) -> None:
    broken = Clock()
    broken.jumped = 1e9
    held = lease(store, broken).take()
    for _ in range(10):
        with pytest.raises(LeaseHeld):
            lease(store, clock).take()
        clock.at += 30
        broken.at += 30
        held.renew()
    held.confirm()


def test_a_longer_lease_is_not_taken_for_a_broken_clock(store: DeltaStore, clock: Clock) -> None:
    lease(store, clock, ttl_s=900.0).take()
    with pytest.raises(LeaseHeld, match="for another 900 s"):
        lease(store, clock, ttl_s=1.0).take()


def test_a_clock_that_is_set_back_does_not_end_the_lease(store: DeltaStore, clock: Clock) -> None:
    held = lease(store, clock).take()
    clock.jumped = -500.0
    clock.at += 40
    held.confirm()
    assert lease(store, clock).holder() is not None


def test_the_seconds_of_a_sleeping_machine_count() -> None:
    assert boot_clock() >= time.monotonic() - 1


# The hint


def test_a_holder_of_this_machine_is_named(store: DeltaStore, clock: Clock, hint: Path) -> None:
    looking = lease(store, clock, hint=hint)
    words = rf"process {os.getpid()} on {socket.gethostname()} since 20\d\d-"
    assert looking.holder() is None
    with lease(store, clock, hint=hint):
        assert looking.holder() is not None
        with pytest.raises(LeaseHeld, match=f"the lease 'work' is held by {words}"):
            lease(store, clock, hint=hint).take()
        assert stat.S_IMODE(hint.stat().st_mode) == 0o600
    assert looking.holder() is None


def test_a_holder_elsewhere_is_known_by_the_tables(
    store: DeltaStore, clock: Clock, hint: Path
) -> None:
    with lease(store, clock):
        assert lease(store, clock, hint=hint).holder() == (
            "an unknown process, for another 60 s at most"
        )
        clock.at += 60
        assert lease(store, clock, hint=hint).holder() is None


def test_words_of_an_earlier_holder_are_not_put_on_another_one(
    store: DeltaStore, clock: Clock, hint: Path
) -> None:
    with lease(store, clock, hint=hint):
        pass
    with lease(store, clock):
        with pytest.raises(LeaseHeld, match="for another 60 s at most"):
            lease(store, clock, hint=hint).take()
        assert "unknown" in str(lease(store, clock, hint=hint).holder())


def test_a_killed_process_is_followed_at_once_on_its_machine_only(
    store: DeltaStore, clock: Clock, hint: Path, tmp_path: Path
) -> None:
    kill(lease(store, clock, hint=hint).take())

    with pytest.raises(LeaseHeld):
        lease(store, clock, hint=tmp_path / "elsewhere.lease").take()
    assert lease(store, clock, hint=hint).holder() is None
    with lease(store, clock, hint=hint) as successor:
        assert successor.fence == 2
        successor.confirm()


def test_a_copied_hint_proves_nothing(
    store: DeltaStore, clock: Clock, hint: Path, tmp_path: Path
) -> None:
    """The copy carries no lock, although the process lives."""
    held = lease(store, clock, hint=hint).take()
    copy = tmp_path / "copy.lease"
    shutil.copy(hint, copy)

    with pytest.raises(LeaseHeld):
        lease(store, clock, hint=copy).take()
    assert lease(store, clock, hint=copy).holder() is not None
    held.confirm()


@pytest.mark.parametrize("change", ["fence", "token", "lock", "half", "other", "empty"])
def test_a_hint_that_does_not_fit_the_lease_proves_nothing(
    store: DeltaStore, clock: Clock, hint: Path, change: str
) -> None:
    kill(lease(store, clock, hint=hint).take())
    content = json.loads(hint.read_bytes())
    changes = {
        "fence": json.dumps(content | {"fence": 2}),
        "token": json.dumps(content | {"token": 2}),
        "lock": json.dumps(content | {"lock": "another machine"}),
        "half": json.dumps(content)[:-5],
        "other": "[1]",
        "empty": "",
    }
    hint.write_text(changes[change])

    with pytest.raises(LeaseHeld):
        lease(store, clock, hint=hint).take()
    assert lease(store, clock, hint=hint).holder() is not None
    clock.at += 60
    assert lease(store, clock, hint=hint).take().fence == 2


def test_a_hanging_process_of_this_machine_does_not_keep_the_lease_for_ever(
    store: DeltaStore, clock: Clock, hint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock stays, and the content of the file is left alone as long as it does."""
    monkeypatch.setattr("onlinerl.rollout_store.tables.lease._HINT_WAIT_S", 0.0)
    hanging = lease(store, clock, hint=hint).take()
    clock.at += 60
    successor = lease(store, clock, hint=hint).take()
    assert successor.fence == 2
    with pytest.raises(LeaseHeld):
        hanging.confirm()
    kill(hanging)
    with pytest.raises(LeaseHeld):  # the file still speaks of fence 1
        lease(store, clock, hint=hint).take()

    clock.at += 30
    successor.renew()
    assert json.loads(hint.read_bytes())["fence"] == 2


def test_a_hint_that_cannot_be_written_costs_only_words(
    store: DeltaStore, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with lease(store, clock, hint=tmp_path / "file" / "work.lease") as held:
        held.confirm()
    assert "cannot open the hint" in caplog.text


def test_one_who_only_looks_keeps_nobody_from_taking(
    store: DeltaStore, clock: Clock, hint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking locks the file for a moment; the killed process is followed at once all the same."""
    kill(lease(store, clock, hint=hint).take())
    with hint.open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: looked_at.close())
        assert lease(store, clock, hint=hint).take().fence == 2
    assert json.loads(hint.read_bytes())["fence"] == 2


def test_a_process_that_is_starting_is_waited_for(
    store: DeltaStore, clock: Clock, hint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has locked the file and not yet written the tables."""
    other = HolderHint(hint)
    assert other.lock()
    assert lease(store, clock, hint=hint).holder() == "a process that is starting"
    monkeypatch.setattr(holder_hint, "_PAUSES_S", ())
    monkeypatch.setattr(time, "sleep", lambda _: other.release())

    lease(store, clock, hint=hint).take()
    assert "process" in str(lease(store, clock, hint=hint).holder())
    assert json.loads(hint.read_bytes())["fence"] == 1


# The heartbeat


def beating(store: DeltaStore, *, ttl_s: float) -> Lease:
    return Lease(store, name="work", ttl_s=ttl_s, heartbeat=True)


def test_a_heartbeat_keeps_the_lease_and_ends_with_it(store: DeltaStore) -> None:
    with beating(store, ttl_s=0.4) as held:
        first = store.versions()["snapshots"]
        until(lambda: store.versions()["snapshots"] >= first + 3)
        held.confirm()
    assert not [each for each in threading.enumerate() if each.name == "lease work"]
    with beating(store, ttl_s=0.4):
        pass


def test_a_storage_that_is_away_is_logged_once_and_ends_the_holder_too(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    def is_lost(held: Lease) -> bool:
        try:
            held.check()
        except LeaseHeld:
            return True
        return False

    with beating(store, ttl_s=0.4) as held:
        store.fault = "away"
        with caplog.at_level(logging.WARNING):
            until(lambda: is_lost(held))
        assert caplog.text.count("cannot renew the lease 'work', trying on") == 1
        store.fault = None
        until(lambda: not is_lost(held))  # nobody else took it meanwhile
        held.confirm()
        assert held.fence == 1


def test_a_heartbeat_of_a_lost_lease_says_so_and_ends(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with beating(store, ttl_s=0.4) as held:
        store.fault = "away"
        time.sleep(0.4)
        store.fault = None
        with Lease(store, name="work", ttl_s=60, clock=lambda: time.time() + 60):
            until(lambda: "taken by somebody else" in caplog.text)
            until(lambda: "lease work" not in {each.name for each in threading.enumerate()})
            with pytest.raises(LeaseHeld, match="taken by somebody else"):
                held.check()


# Processes


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_that_was_killed_is_followed_at_once(store: DeltaStore, hint: Path) -> None:
    successor = Lease(store, name="work", ttl_s=600, hint=hint)
    with start(HOLD, store.root, hint) as process:
        assert read_line(process) == "1"
        with pytest.raises(LeaseHeld, match=f"held by process {process.pid} on"):
            successor.take()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(LeaseHeld, match=f"held by process {process.pid} on"):
            successor.take()
        process.kill()
        process.wait()

        with successor:
            assert successor.fence == 2


def test_of_processes_that_race_one_works_at_a_time(
    store: DeltaStore, hint: Path, tmp_path: Path
) -> None:
    """Two share a hint; the third is as if on another machine. The log shows no overlap."""
    log = tmp_path / "log"
    hints = (hint, hint, tmp_path / "other.lease")
    racers = [start(RACE, store.root, each, log) for each in hints]
    for racer in racers:
        assert read_line(racer) == "ready"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        racer.communicate(timeout=120)
        assert racer.returncode == 0

    lines = log.read_text().splitlines()
    fences = [int(line.split()[0]) for line in lines[::2]]
    assert lines == [f"{fence} {step}" for fence in fences for step in ("begins", "ends")]
    assert fences == sorted(set(fences))
    assert len(fences) == 24
