"""Several holders, one store, clocks that disagree: whatever the order, one works at a time."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from onlinerl.errors import LeaseHeld, ServiceUnavailable
from onlinerl.rollout_store.tables import holder_hint
from onlinerl.rollout_store.tables import lease as lease_module
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.lease import MAX_SKEW_S, Lease

TTL_S = 60.0
NUM_HOLDERS = 4
MACHINES = (0, 0, 1, 2)
"""The first two share a machine, and so a hint."""

holders = st.integers(0, NUM_HOLDERS - 1)


class World(DeltaStore):
    """A store that lets somebody else act between a read and its commit, or fails then."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.before_commit: Callable[[], None] = lambda: None
        self.fails_after_commit = False

    def append(
        self, table: str, rows: pa.Table, *, transactions: Sequence[Transaction] = ()
    ) -> int:
        interloper, self.before_commit = self.before_commit, lambda: None
        fails, self.fails_after_commit = self.fails_after_commit, False
        interloper()
        version = super().append(table, rows, transactions=transactions)
        if fails:
            raise ServiceUnavailable("the storage did not answer")
        return version


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = World(str(self.folder / "store"))
        self.store.create()
        self.now = 1e9
        self.skews = [0.0] * NUM_HOLDERS
        self.fences: list[int] = []
        self.leases = [self.made(number) for number in range(NUM_HOLDERS)]

    def teardown(self) -> None:
        for lease in self.leases:
            assert lease._hint is not None
            lease._hint.release()
        shutil.rmtree(self.folder)

    def made(self, number: int) -> Lease:
        return Lease(
            self.store,
            name="work",
            ttl_s=TTL_S,
            hint=self.folder / f"{MACHINES[number]}.lease",
            clock=lambda: self.now + self.skews[number],
            elapsed=lambda: self.now,
        )

    @initialize(skews=st.tuples(*[st.floats(0, MAX_SKEW_S)] * NUM_HOLDERS))
    def disagree(self, skews: tuple[float, ...]) -> None:
        self.skews = list(skews)

    def take(self, number: int) -> None:
        if self.leases[number].fence:
            return
        try:
            self.leases[number].take()
        except (LeaseHeld, ServiceUnavailable):
            return
        self.fences.append(self.leases[number].fence)

    def renew(self, number: int) -> None:
        try:
            self.leases[number].renew()
        except (LeaseHeld, ServiceUnavailable):
            return

    def give_back(self, number: int) -> None:
        self.leases[number].give_back()

    def kill(self, number: int) -> None:
        """The kernel frees the lock of the process; another one starts in its place."""
        hint = self.leases[number]._hint
        assert hint is not None
        hint.release()
        self.leases[number] = self.made(number)

    def act(self, action: str, number: int) -> None:
        getattr(self, action)(number)

    @rule(action=st.sampled_from(["take", "take", "renew", "give_back", "kill"]), number=holders)
    def one_acts(self, action: str, number: int) -> None:
        self.act(action, number)

    @rule(
        slow=st.sampled_from(["take", "renew", "give_back"]),
        number=holders,
        quick=st.sampled_from(["take", "renew", "give_back", "kill"]),
        other=holders,
        seconds=st.sampled_from([0.0, 1.0, 30.0, 54.0, 56.0, 70.0]),
    )
    def one_is_frozen_before_its_commit_while_another_acts(
        self, slow: str, number: int, quick: str, other: int, seconds: float
    ) -> None:
        if number == other:
            return

        def interloper() -> None:
            self.now += seconds
            self.act(quick, other)
            self.at_most_one_holds()

        self.store.before_commit = interloper
        self.act(slow, number)
        self.store.before_commit = lambda: None

    @rule(action=st.sampled_from(["take", "renew", "give_back"]), number=holders)
    def the_storage_does_not_answer(self, action: str, number: int) -> None:
        self.store.fails_after_commit = True
        self.act(action, number)
        self.store.fails_after_commit = False

    @rule(seconds=st.sampled_from([0.5, 5.0, 29.0, 31.0, 54.9, 55.0, 60.0, 65.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(original=st.sampled_from(MACHINES), copy=st.sampled_from(MACHINES))
    def a_hint_is_copied(self, original: int, copy: int) -> None:
        """As when a data folder is copied to another machine: the content, not the lock."""
        file = self.folder / f"{original}.lease"
        if original != copy and file.exists():
            (self.folder / f"{copy}.lease").write_bytes(file.read_bytes())

    @rule()
    def all_confirm(self) -> None:
        """Not at every step, since that also renews."""
        assert sum(self.passes(lease.confirm) for lease in self.leases) <= 1

    @invariant()
    def at_most_one_holds(self) -> None:
        assert sum(self.passes(lease.check) for lease in self.leases) <= 1

    @invariant()
    def fences_rise(self) -> None:
        assert self.fences == sorted(set(self.fences))

    @staticmethod
    def passes(question: Callable[[], None]) -> bool:
        try:
            question()
        except LeaseHeld:
            return False
        return True


def test_at_most_one_holds_whatever_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that was stopped with the hint locked would be waited for in real time.
    monkeypatch.setattr(lease_module, "_HINT_WAIT_S", 0.0)
    monkeypatch.setattr(holder_hint, "_PAUSES_S", ())
    run_state_machine_as_test(
        Interleavings, settings=settings(max_examples=80, stateful_step_count=30, deadline=None)
    )
