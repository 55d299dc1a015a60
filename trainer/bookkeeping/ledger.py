"""Which cycles there were, how far each came, and which rows have been learned from.

planned -> trained (checkpoint on disk) -> registered, or -> failed. Only a registered cycle uses
its rows up, in the same transaction. A process that dies leaves its cycle as it was; the next one
goes on with the same plan.
"""

import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from onlinerl.errors import LeaseHeld
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.trainer.bookkeeping.database import Database
from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.rollouts.rows import RowKey

Status = Literal["planned", "trained", "registered", "failed"]


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """A line of the ledger."""

    number: int
    status: Status
    attempts: int
    """Processes that have begun its update."""
    plan: Plan
    finished_at: float | None = None
    version: int | None = None
    reason: str | None = None

    @property
    def cycle_id(self) -> str:
        """Name of the cycle in logs, folders and the registry.

        The time of planning is in it because numbers begin again when the ledger is lost, and the
        registry still knows the old ones.
        """
        return f"{self.plan.policy}-c{self.number:05d}-{self.plan.planned_at:%Y%m%dt%H%M%S}"


@dataclass(frozen=True, kw_only=True)
class LastCycle:
    """When the latest finished cycle of a policy ended, and how."""

    finished_at: float
    status: Status


class Ledger:
    """The ledger of one data folder.

    Every write needs the lease under which it is made. It raises LeaseHeld when that lease is no
    longer held, or when the ledger has seen a higher fence: another trainer works with it by then.
    """

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def cycle(self, number: int) -> Cycle:
        """A cycle by its number."""
        with self._database.read() as connection:
            row = connection.execute("SELECT * FROM cycles WHERE number = ?", (number,)).fetchone()
        return _cycle(row)

    def count(self) -> int:
        """Cycles that were ever planned."""
        with self._database.read() as connection:
            return int(connection.execute("SELECT count(*) FROM cycles").fetchone()[0])

    def unfinished(self, policy: str) -> Cycle | None:
        """The cycle that was planned or trained and not finished; at most one exists."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT * FROM cycles WHERE policy = ? AND status IN ('planned', 'trained')"
                " ORDER BY number LIMIT 1",
                (policy,),
            ).fetchone()
        return None if row is None else _cycle(row)

    def last_finished(self, policy: str) -> LastCycle | None:
        """The latest registered or failed cycle."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT finished_at, status FROM cycles WHERE policy = ? AND finished_at NOT NULL"
                " ORDER BY number DESC LIMIT 1",
                (policy,),
            ).fetchone()
        return None if row is None else LastCycle(finished_at=row[0], status=row[1])

    def trained_rows(self) -> list[RowKey]:
        """Rows that some registered cycle has learned from."""
        with self._database.read() as connection:
            rows = connection.execute("SELECT interaction_id, choice_index FROM trained")
            return [(row[0], row[1]) for row in rows]

    def baselines(self, policy: str) -> dict[str, float]:
        """Mean rewards by tenant after the last registered cycle."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT baselines FROM cycles WHERE policy = ? AND status = 'registered'"
                " ORDER BY number DESC LIMIT 1",
                (policy,),
            ).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def highest_fence(self, name: str) -> int:
        """The highest fence of a lease that this ledger has seen; 0 when it has seen none."""
        with self._database.read() as connection:
            return _highest_fence(connection, name)

    def begin(self, *, lease: Lease) -> None:
        """Refuse every earlier holder of the lease from now on; call it before reading.

        Raises:
            LeaseHeld: the lease is lost, or a later holder was here.
        """
        with self._database.write() as connection:
            _fence(connection, lease)

    def add(self, plan: Plan, *, lease: Lease) -> Cycle:
        """Record a plan before anything is done about it."""
        with self._database.write() as connection:
            _fence(connection, lease)
            number = connection.execute(
                "INSERT INTO cycles (policy, status, plan, planned_at) VALUES (?, 'planned', ?, ?)",
                (plan.policy, plan.model_dump_json(), self._clock()),
            ).lastrowid
        return Cycle(number=int(number or 0), status="planned", attempts=0, plan=plan)

    def begin_attempt(self, cycle: Cycle, *, lease: Lease) -> None:
        """Count a process that begins the update of the cycle."""
        self._update(cycle, "attempts = attempts + 1", (), lease=lease)

    def mark_trained(self, cycle: Cycle, *, lease: Lease) -> None:
        """The checkpoint is on disk."""
        self._update(cycle, "status = 'trained'", (), lease=lease)

    def mark_failed(self, cycle: Cycle, *, reason: str, lease: Lease) -> None:
        """Give the cycle up; its rows are free for the next one."""
        change = "status = 'failed', reason = ?, finished_at = ?"
        self._update(cycle, change, (reason, self._clock()), lease=lease)

    def mark_registered(
        self, cycle: Cycle, *, version: int, baselines: dict[str, float], lease: Lease
    ) -> None:
        """The version is in the registry: use the rows up and finish, in one transaction.

        Raises:
            sqlite3.IntegrityError: when a row was learned from before.
        """
        with self._database.write() as connection:
            _fence(connection, lease)
            connection.executemany(
                "INSERT INTO trained (interaction_id, choice_index, cycle) VALUES (?, ?, ?)",
                [(*key, cycle.number) for key in cycle.plan.keys],
            )
            connection.execute(
                "UPDATE cycles SET status = 'registered', version = ?, baselines = ?,"
                " finished_at = ? WHERE number = ?",
                (version, json.dumps(baselines), self._clock(), cycle.number),
            )

    def _update(
        self, cycle: Cycle, change: str, values: tuple[object, ...], *, lease: Lease
    ) -> None:
        with self._database.write() as connection:
            _fence(connection, lease)
            connection.execute(
                f"UPDATE cycles SET {change} WHERE number = ?", (*values, cycle.number)
            )


def _highest_fence(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT fence FROM fences WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def _fence(connection: sqlite3.Connection, lease: Lease) -> None:
    """Let only the latest holder of a lease commit the transaction.

    Raises:
        LeaseHeld: it is another one.
    """
    lease.check()
    highest = _highest_fence(connection, lease.name)
    if highest > lease.fence:
        raise LeaseHeld(
            f"lost the lease {lease.name!r} (fence {lease.fence}): the ledger was written under "
            f"fence {highest}; run the trainer again, it takes the next one"
        )
    connection.execute(
        "INSERT OR REPLACE INTO fences (name, fence) VALUES (?, ?)", (lease.name, lease.fence)
    )


def _cycle(row: sqlite3.Row) -> Cycle:
    return Cycle(
        number=row["number"],
        status=row["status"],
        attempts=row["attempts"],
        plan=Plan.model_validate_json(row["plan"]),
        finished_at=row["finished_at"],
        version=row["version"],
        reason=row["reason"],
    )
