"""One holder at a time for one piece of work on one set of tables, with a fencing number.

A lease is four application transactions of the table `snapshots`, written in one commit: when it
expires, its fence, the token of its holder, and how long it lasts without renewal. A commit
replaces them only on top of the numbers that the writer read. So a lease works on every storage
that the tables work on, and costs a version of that table for every taking, renewal and return.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from onlinerl.errors import LeaseHeld, ServiceUnavailable, StoreConflict
from onlinerl.process.fault_streak import FaultStreak
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.holder_hint import HolderHint, Taking
from onlinerl.rollout_store.tables.rows import schema_of

logger = logging.getLogger(__name__)

TABLE = "snapshots"
MAX_SKEW_S = 5.0
"""How far the clocks of two machines may lie apart. A holder stops that long before its lease ends,
or a quarter of the lease where that is shorter."""
_ATTEMPTS = 5
_HINT_WAIT_S = 2.0
_JOIN_S = 10.0


def boot_clock() -> float:
    """Seconds, also those for which the machine sleeps: `time.monotonic` leaves them out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class _Stored:
    """A lease as one version of the table has it; None where a number was never written."""

    until: int | None
    """When it expires, microseconds since 1970; 0 after it was given back."""
    fence: int | None
    """Number of the last taking."""
    token: int | None
    """Random number of the last taking."""
    ttl: int | None
    """How long the holder may go without renewal, microseconds."""

    @property
    def taking(self) -> Taking:
        return Taking(self.fence, self.token)


class Lease:
    """The right to do one piece of work, held between `take` and `give_back`, or in a `with`.

    FREE -> HELD -> FREE: given back, or expired `ttl_s` after the last renewal. Every taking raises
    the fence by one, and nothing lowers it. What the holder writes can therefore be refused by
    whoever remembers a higher fence, and a holder that slept through its own end finds out.

    Two clocks decide. Others compare the stored expiry with their wall clock. The holder counts the
    seconds since its last renewal and stops earlier than they can start, as long as wall clocks lie
    at most `MAX_SKEW_S` apart. Beyond that only `confirm` is certain.

    One thread uses an object; the heartbeat of its own is the exception.

    Args:
        store: Its table `snapshots` must exist when the lease is taken.
        name: The work, e.g. `train assistant`.
        ttl_s: Seconds after which others may take over from a holder that does not renew.
        hint: File that tells others of this machine who holds the lease, and whether that process
            is gone. None: every successor waits until the lease has expired.
        min_fence: The highest fence known from elsewhere. The next one is higher, also when the
            table was created again and knows none.
        heartbeat: Renew from a thread. Otherwise the holder calls `renew` often enough.
        clock: Seconds since 1970.
        elapsed: Seconds that only ever grow.
    """

    def __init__(
        self,
        store: DeltaStore,
        *,
        name: str,
        ttl_s: float,
        hint: Path | None = None,
        min_fence: int = 0,
        heartbeat: bool = False,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = boot_clock,
    ) -> None:
        self.name = name
        self.fence = 0
        """The number of this taking, at least 1; 0 while the lease is not held."""
        self._store = store
        self._ttl_s = ttl_s
        self._hint = None if hint is None else HolderHint(hint)
        self._min_fence = min_fence
        self._clock = clock
        self._elapsed = elapsed
        self._app_id = f"onlinerl/lease/{name}"
        self._mutex = threading.Lock()
        self._heartbeat = _Heartbeat(self, ttl_s=ttl_s) if heartbeat else None
        self._renewed_at = 0.0
        self._loss: str | None = "it was not taken"
        self._token = 0

    def __enter__(self) -> Self:
        return self.take()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_back()

    def take(self) -> Self:
        """Take it at once or not at all.

        Raises:
            LeaseHeld: another process holds it, or took it in the same moment.
            ServiceUnavailable: the storage failed, or there is no table. Call `take` of the same
                object again: it is not locked out by a commit of its own that arrived although
                the storage reported an error.
        """
        if self.fence:
            raise RuntimeError(f"the lease {self.name!r} is held by this object already")
        try:
            with self._mutex:
                self._take()
        except BaseException:
            if self._hint is not None:
                self._hint.release()
            raise
        if self._heartbeat is not None:
            self._heartbeat.start()
        return self

    def give_back(self) -> None:
        """Free it for others, unless it was lost. If the storage fails, it expires instead."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        try:
            self._free()
        finally:
            self._loss = self._loss or "it was given back"
            self.fence = 0
            if self._hint is not None:
                self._hint.release()

    def _free(self) -> None:
        # A heartbeat that waits for the storage has the mutex; the lease expires then.
        if not self.fence or not self._mutex.acquire(timeout=_JOIN_S):
            return
        try:
            stored = self._read()
            if stored.taking == Taking(self.fence, self._token):
                self._write(stored, replace(stored, until=0))
        except (StoreConflict, ServiceUnavailable) as error:
            logger.warning("the lease %r was not given back, it expires: %s", self.name, error)
        finally:
            self._mutex.release()

    def renew(self) -> None:
        """Hold it for another `ttl_s`; does nothing while more than half of that is left.

        A lease that expired can still be renewed while nobody else took it: the unchanged fence
        proves that nobody did anything under it since.

        Raises:
            LeaseHeld: another process took it, or it was given back.
            ServiceUnavailable: the storage failed; the lease lasts as long as before.
        """
        with self._mutex:
            if self._is_renewal_due():
                self._extend()

    def check(self) -> None:
        """Whether this holder may go on, by its own clock. Costs nothing.

        Raises:
            LeaseHeld: the lease was lost, or it was not renewed in time.
        """
        if self._loss is not None:
            self._raise_lost(self._loss)
        if self._elapsed() >= self._renewed_at + self._holding_s:
            self._raise_lost(f"it was not renewed for {self._holding_s:g} s")

    def confirm(self) -> None:
        """Ask the tables, before something outside is changed that checks no fence.

        Afterwards at least half of `ttl_s`, less the allowance for clocks, is left.

        Raises:
            LeaseHeld: another process took it, or it was not renewed in time.
            ServiceUnavailable: the storage failed.
        """
        self.check()
        with self._mutex:
            if self._is_renewal_due():
                self._extend()
            else:
                self._require_mine(self._read())
        self.check()

    def holder(self) -> str | None:
        """Who holds it now, in words; None when nobody does. Changes nothing.

        Raises:
            ServiceUnavailable: no process of this machine is known to hold it, and the storage
                does not answer.
        """
        words = self._hint and self._hint.holder()
        if words:
            return words
        if not self._store.exists(TABLE):
            return None
        stored = self._read()
        if not self._is_held(stored) or self._is_abandoned(stored):
            return None
        return f"an unknown process, for another {self._left_s(stored):.0f} s at most"

    @property
    def renewal_due_in_s(self) -> float:
        """Seconds until half of `ttl_s` has passed since the last renewal; 0 afterwards."""
        return max(0.0, self._renewed_at + self._ttl_s / 2 - self._elapsed())

    @property
    def _holding_s(self) -> float:
        """How long the holder trusts a renewal."""
        return self._ttl_s - min(MAX_SKEW_S, self._ttl_s / 4)

    def _take(self) -> None:
        for _ in range(_ATTEMPTS):
            stored = self._wait_for_hint()
            if self._is_held(stored) and not self._may_follow(stored):
                self._refuse(stored)
            fence = max(stored.fence or 0, self._min_fence) + 1
            self._token, began = secrets.randbits(62), self._elapsed()
            try:
                self._write(stored, self._renewed(fence))
            except StoreConflict:  # somebody else took it in the same moment: see who
                continue
            self.fence, self._renewed_at, self._loss = fence, began, None
            if self._hint is not None:
                self._hint.write(Taking(fence, self._token))
            return
        self._raise_contended()

    def _wait_for_hint(self) -> _Stored:
        """Lock the hint and read the lease.

        Another process that has the lock is about to take the lease, to give it back, or to say
        who holds it; that takes a moment. One that hangs must not block the lease, so after that
        moment it is taken without the hint.
        """
        hint, deadline = self._hint, time.monotonic() + _HINT_WAIT_S
        while True:
            is_waiting = hint is not None and not hint.lock() and hint.holder() is not None
            stored = self._read()
            if not is_waiting or self._is_held(stored) or time.monotonic() > deadline:
                return stored
            time.sleep(0.05)

    def _refuse(self, stored: _Stored) -> NoReturn:
        left_s = self._left_s(stored)
        longest_s = (stored.ttl or _micros(self._ttl_s)) / 1e6
        if left_s > longest_s + MAX_SKEW_S:
            # No holder may ask for that much: a wrong clock wrote it. The lease ends `longest_s`
            # from now instead, unless its holder lives: that one renews it before.
            left_s = longest_s
            with contextlib.suppress(StoreConflict):
                self._write(stored, replace(stored, until=self._now() + _micros(longest_s)))
        words = self._hint and self._hint.holder()
        by = f"by {words}" if words else f"for another {left_s:.0f} s at most"
        raise LeaseHeld(f"the lease {self.name!r} is held {by}")

    def _is_renewal_due(self) -> bool:
        if self._loss is not None:
            self._raise_lost(self._loss)
        return self.renewal_due_in_s == 0.0

    def _extend(self) -> None:
        for _ in range(_ATTEMPTS):
            stored = self._read()
            self._require_mine(stored)
            began = self._elapsed()
            try:
                self._write(stored, self._renewed(self.fence))
            except StoreConflict:  # somebody took it, or corrected its expiry: look again
                continue
            self._renewed_at = began
            if self._hint is not None and not self._hint.is_locked and self._hint.lock():
                self._hint.write(stored.taking)
            return
        self._raise_contended()

    def _require_mine(self, stored: _Stored) -> None:
        if stored.taking == Taking(self.fence, self._token):
            return
        self._loss = f"it was taken by somebody else, whose fence is {stored.fence}"
        if stored.fence is None:
            self._loss = f"the table {TABLE} knows no such lease, so it was created again"
        self._raise_lost(self._loss)

    def _raise_contended(self) -> NoReturn:
        raise ServiceUnavailable(
            f"could not write the lease {self.name!r}: others change the table {TABLE} too often"
        )

    def _raise_lost(self, reason: str) -> NoReturn:
        fence = f" (fence {self.fence})" if self.fence else ""
        raise LeaseHeld(f"lost the lease {self.name!r}{fence}: {reason}")

    def _is_held(self, stored: _Stored) -> bool:
        return stored.until is not None and stored.until > self._now()

    def _is_abandoned(self, stored: _Stored) -> bool:
        """Whether its holder is a process of this machine that is certainly gone."""
        return self._hint is not None and self._hint.abandoned() == stored.taking

    def _may_follow(self, stored: _Stored) -> bool:
        """Whether it need not expire first.

        That is so after a `take` of this object that arrived although the storage reported an
        error: nobody else knows the token.
        """
        return stored.token == self._token or self._is_abandoned(stored)

    def _left_s(self, stored: _Stored) -> float:
        return ((stored.until or 0) - self._now()) / 1e6

    def _now(self) -> int:
        return _micros(self._clock())

    def _renewed(self, fence: int) -> _Stored:
        """The lease as this holder writes it now."""
        ttl = _micros(self._ttl_s)
        return _Stored(until=max(1, self._now() + ttl), fence=fence, token=self._token, ttl=ttl)

    def _read(self) -> _Stored:
        delta = self._store.delta(TABLE)
        return _Stored(
            until=delta.transaction_version(self._app_id),
            fence=delta.transaction_version(f"{self._app_id}/fence"),
            token=delta.transaction_version(f"{self._app_id}/token"),
            ttl=delta.transaction_version(f"{self._app_id}/ttl"),
        )

    def _write(self, stored: _Stored, new: _Stored) -> None:
        """Replace all numbers in one commit; also those that stay, so that every change collides.

        Raises:
            StoreConflict: they are not as in `stored` any more.
            ServiceUnavailable: the storage failed.
        """
        numbers = [
            (self._app_id, new.until, stored.until),
            (f"{self._app_id}/fence", new.fence, stored.fence),
            (f"{self._app_id}/token", new.token, stored.token),
            (f"{self._app_id}/ttl", new.ttl, stored.ttl),
        ]
        changes = [
            Transaction(app_id=app_id, version=number, expected=expected)
            for app_id, number, expected in numbers
            if number is not None
        ]
        self._store.append(TABLE, schema_of(TABLES[TABLE]).empty_table(), transactions=changes)


class _Heartbeat:
    """Renews a lease from a thread until it is stopped or the lease is lost.

    A storage that is away is tried again, at growing intervals, and logged once per reason. A lease
    that expires meanwhile is lost for its holder too (`Lease.check`), until a renewal succeeds.
    """

    def __init__(self, lease: Lease, *, ttl_s: float) -> None:
        self._lease = lease
        self._ttl_s = ttl_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stopped.clear()
        name = f"lease {self._lease.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_S)
            self._thread = None

    def _run(self) -> None:
        lease, streak = self._lease, FaultStreak(max_wait_s=self._ttl_s / 10)
        wait_s = lease.renewal_due_in_s
        while not self._stopped.wait(wait_s):
            try:
                lease.renew()
            except LeaseHeld as error:
                logger.warning("%s", error)
                return
            except ServiceUnavailable as error:
                if streak.add(str(error)):
                    logger.warning("cannot renew the lease %r, trying on: %s", lease.name, error)
                wait_s = streak.wait_s(self._ttl_s / 100)
            else:
                streak.clear()
                wait_s = lease.renewal_due_in_s


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)
