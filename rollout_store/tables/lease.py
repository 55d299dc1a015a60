"""One worker at a time on one set of tables, kept in the tables themselves.

The lease is an application transaction of the table `snapshots`: a number that is replaced only
by a writer that names the number it read. It works on every storage that the tables work on.
"""

import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from onlinerl.errors import LeaseHeld, ServiceUnavailable, StoreConflict
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.rows import schema_of

TABLE = "snapshots"


class StoreLease:
    """FREE (0 or a time that has passed) -> HELD (until the number, microseconds since 1970).

    `with` takes and gives back; `renew` moves the end, and fails when somebody else took over.
    A holder that dies leaves it to the next one after `ttl_s` seconds.
    """

    def __init__(
        self,
        store: DeltaStore,
        *,
        name: str,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._name = name
        self._app_id = f"onlinerl/lease/{name}"
        self._ttl_s = ttl_s
        self._clock = clock
        self._until: int | None = None

    def __enter__(self) -> Self:
        """Take it.

        Raises:
            LeaseHeld: somebody else has it, or took it in the same moment.
        """
        stored = self._store.transaction_version(TABLE, self._app_id)
        if stored is not None and stored > self._now():
            raise LeaseHeld(
                f"the lease {self._name!r} is held for another "
                f"{(stored - self._now()) / 1e6:.0f} s at most"
            )
        self._replace(stored)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back, unless it was lost."""
        until, self._until = self._until, None
        # Whatever goes wrong here, the lease ends by itself.
        with contextlib.suppress(StoreConflict, ServiceUnavailable):
            self._write(until, 0)

    def renew(self) -> None:
        """Hold it for another `ttl_s`; changes nothing while more than half of that is left.

        Raises:
            LeaseHeld: somebody else took it over meanwhile.
        """
        if self._until is None or self._until - self._now() < self._ttl_s * 1e6 / 2:
            self._replace(self._until)

    def _replace(self, stored: int | None) -> None:
        until = max(self._now() + int(self._ttl_s * 1e6), (stored or 0) + 1)
        try:
            self._write(stored, until)
        except StoreConflict as error:
            raise LeaseHeld(f"the lease {self._name!r} was taken by somebody else") from error
        self._until = until

    def _write(self, stored: int | None, until: int) -> None:
        change = Transaction(app_id=self._app_id, version=until, expected=stored)
        self._store.append(TABLE, schema_of(TABLES[TABLE]).empty_table(), transactions=[change])

    def _now(self) -> int:
        return int(self._clock() * 1e6)
