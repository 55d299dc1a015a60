"""One trainer at a time: a lease with a heartbeat, an end and a fencing number."""

import logging
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from onlinerl.errors import LeaseHeld
from onlinerl.trainer.bookkeeping.database import Database
from onlinerl.trainer.bookkeeping.process_identity import start_time

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Seconds since 1970."""


class Lease:
    """The right to run a cycle, held while the context is open.

    FREE -> HELD (`__enter__`, one holder) -> FREE (`__exit__`, or the holder died or was not heard
    of for `ttl_s`). A heartbeat thread renews it. Each taking raises the fencing number, and the
    ledger refuses writes under an older one: a holder that was frozen and overtaken cannot
    finish what it began.
    """

    def __init__(
        self, database: Database, *, name: str, ttl_s: float, clock: Clock = time.time
    ) -> None:
        self._database = database
        self._name = name
        self._ttl_s = ttl_s
        self._clock = clock
        self._stopped = threading.Event()
        self._heartbeat = threading.Thread(target=self._renew, name=f"lease-{name}", daemon=True)
        self.fence = 0
        """Number of this taking; 0 before it."""

    def __enter__(self) -> Self:
        """Take the lease.

        Raises:
            LeaseHeld: naming who holds it and since when.
        """
        with self._database.write() as connection:
            held = self._row(connection)
            if held is not None and self._is_alive(held):
                raise LeaseHeld(_describe(held, name=self._name))
            self.fence = (0 if held is None else held["fence"]) + 1
            connection.execute(
                "INSERT OR REPLACE INTO leases (name, fence, host, pid, started, taken_at, seen_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (self._name, self.fence, *_myself(), self._clock(), self._clock()),
            )
        self._heartbeat.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back, unless somebody else has it by now."""
        self._stopped.set()
        self._heartbeat.join(timeout=self._ttl_s)
        with self._database.write() as connection:
            connection.execute(
                "UPDATE leases SET host = NULL, pid = NULL WHERE name = ? AND fence = ?",
                (self._name, self.fence),
            )

    def held_by(self) -> str | None:
        """Who holds it now, in words, or None when it is free. Changes nothing."""
        with self._database.read() as connection:
            held = self._row(connection)
        if held is None or not self._is_alive(held):
            return None
        return _describe(held, name=self._name)

    def check(self, connection: sqlite3.Connection) -> None:
        """To be called inside a transaction that only the holder may commit.

        Raises:
            LeaseHeld: when another process has taken the lease since.
        """
        held = self._row(connection)
        if held is None or held["fence"] != self.fence or held["pid"] is None:
            raise LeaseHeld(
                f"lost the lease {self._name!r} (fence {self.fence}): it was not renewed"
            )

    def confirm(self) -> None:
        """Before something outside is changed that cannot be fenced.

        Raises:
            LeaseHeld: when another process has taken the lease since.
        """
        with self._database.read() as connection:
            self.check(connection)

    def _row(self, connection: sqlite3.Connection) -> sqlite3.Row | None:
        row: sqlite3.Row | None = connection.execute(
            "SELECT * FROM leases WHERE name = ?", (self._name,)
        ).fetchone()
        return row

    def _is_alive(self, held: sqlite3.Row) -> bool:
        if held["pid"] is None or self._clock() - held["seen_at"] > self._ttl_s:
            return False
        is_elsewhere = bool(held["host"] != socket.gethostname())
        return is_elsewhere or start_time(held["pid"]) == held["started"]

    def _renew(self) -> None:
        while not self._stopped.wait(self._ttl_s / 4):
            try:
                with self._database.write() as connection:
                    connection.execute(
                        "UPDATE leases SET seen_at = ? WHERE name = ? AND fence = ?",
                        (self._clock(), self._name, self.fence),
                    )
            except sqlite3.OperationalError:
                logger.warning("could not renew the lease", extra={"lease": self._name})


def _myself() -> tuple[str, int, str | None]:
    return socket.gethostname(), os.getpid(), start_time(os.getpid())


def _describe(held: sqlite3.Row, *, name: str) -> str:
    since = datetime.fromtimestamp(held["taken_at"], tz=UTC).isoformat(timespec="seconds")
    return f"the lease {name!r} is held by process {held['pid']} on {held['host']} since {since}"
