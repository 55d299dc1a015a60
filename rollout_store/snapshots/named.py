"""Snapshots: named versions of all tables that can be read again later, row for row.

The table `snapshots` is append-only, and the newest row of a name counts:

    create -> drop      by a person, or by a cycle that ended
    create -> mark      rows or files of it are gone, so it cannot be read any more
    create -> (expired) `expires_at` has passed

Files of a snapshot in state `create` are never vacuumed; see `pins`. Names with a slash, e.g.
`cycle/…`, belong to processes and expire by themselves.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

import duckdb

from onlinerl.errors import ConfigError, ServiceUnavailable, StoreConflict
from onlinerl.rollout_store.schema import SnapshotRow
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.files import TableFiles
from onlinerl.rollout_store.tables.log import files_of_version
from onlinerl.rollout_store.tables.rows import to_table

TABLE = "snapshots"
Action = Literal["create", "drop", "mark"]

GONE = "files that it needs are gone"
"""The reason that marks a snapshot with missing files."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NEWEST = """
SELECT name, action, versions, actor, reason, expires_at, acted_at FROM stored
QUALIFY row_number() OVER (PARTITION BY name ORDER BY
    (contains(name, '/') AND action = 'mark') DESC, acted_at DESC, action = 'mark' DESC) = 1
ORDER BY acted_at, name
"""
"""A mark must never be missed, so it wins over other rows of the same time. The mark of a process's
hold is final, because the process may repeat its hold while the mark is written."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The newest state of a name."""

    name: str
    action: Action
    versions: Mapping[str, int]
    actor: str
    reason: str
    expires_at: datetime | None
    acted_at: datetime

    def is_held(self, *, at: datetime) -> bool:
        """Whether its versions must stay readable at this time."""
        return self.action == "create" and (self.expires_at is None or at < self.expires_at)


def snapshots(store: DeltaStore) -> list[Snapshot]:
    """The newest state of every name that was ever used, oldest first."""
    if not store.exists(TABLE):
        return []
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("stored", store.dataset(TABLE))
        rows = connection.sql(_NEWEST).to_arrow_table().to_pylist()
    return [Snapshot(**{**row, "versions": json.loads(row["versions"])}) for row in rows]


def find(store: DeltaStore, name: str) -> Snapshot | None:
    """The newest state of a name, or None if the name was never used."""
    return next((each for each in snapshots(store) if each.name == name), None)


def readable(store: DeltaStore, name: str, *, at: datetime) -> Snapshot:
    """The snapshot of this name, whose rows can be read.

    Raises:
        ConfigError: there is no such snapshot, or it cannot be read any more; the message says why.
    """
    snapshot = find(store, name)
    if snapshot is None:
        raise _unknown(name)
    if snapshot.is_held(at=at):
        return snapshot
    if snapshot.action == "mark":
        raise ConfigError(
            f"snapshot {name!r} cannot be read since {snapshot.acted_at:%Y-%m-%d %H:%M}: "
            f"{snapshot.reason}; create a new one"
        )
    ended = snapshot.expires_at if snapshot.action == "create" else snapshot.acted_at
    raise ConfigError(f"snapshot {name!r} was given up at {ended:%Y-%m-%d %H:%M}; create a new one")


def create_snapshot(
    store: DeltaStore, name: str, *, actor: str, reason: str, at: datetime
) -> Snapshot:
    """Hold the newest version of every table under a new name.

    Raises:
        ConfigError: the name is taken or malformed, or there are no tables yet.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a snapshot name: letters, digits, dot, dash and underscore, at most "
            "128, beginning with a letter or digit"
        )
    if not store.versions():
        raise ConfigError(f"there are no tables under {store.root}; `onlinerl ingest` creates them")
    store.create()
    app_id = f"onlinerl/snapshot/{name}"
    number = store.transaction_version(TABLE, app_id)
    latest = find(store, name)
    if latest is not None and latest.is_held(at=at):
        raise _taken(latest)
    # The number was read before the look-up, so of two processes that create the same name at the
    # same time only one commits.
    claim = Transaction(app_id=app_id, version=(number or 0) + 1, expected=number)
    held = Snapshot(
        name=name, action="create", versions=store.versions(), actor=actor, reason=reason,
        expires_at=None, acted_at=_after(latest, at),
    )  # fmt: skip
    try:
        store.append(TABLE, to_table([_row(held)]), transactions=[claim])
    except StoreConflict as error:
        raise ConfigError(f"snapshot {name!r} is being created by somebody else") from error
    _audit(store, held)
    return held


def drop_snapshot(
    store: DeltaStore, name: str, *, actor: str, reason: str, at: datetime
) -> Snapshot:
    """Stop holding the versions of a snapshot; dropping it again changes nothing.

    Raises:
        ConfigError: there is no snapshot of that name.
    """
    latest = find(store, name)
    if latest is None:
        raise _unknown(name)
    if latest.action == "drop":
        return latest
    return _change(store, latest, "drop", actor=actor, reason=reason, at=at)


def mark_snapshot(
    store: DeltaStore, held: Snapshot, *, actor: str, reason: str, at: datetime
) -> Snapshot:
    """Record that rows of the snapshot are gone, so that it cannot be read and holds nothing."""
    return _change(store, held, "mark", actor=actor, reason=reason, at=at)


def mark_where(
    store: DeltaStore,
    table: str,
    has_rows: Callable[[int], bool],
    *,
    actor: str,
    reason: str,
    at: datetime,
) -> list[str]:
    """Mark every snapshot that holds a version of the table with rows that must go.

    Snapshots that can never be read again are marked as well, because they would fail every check.

    Args:
        store: Where the tables lie.
        table: Name of the table.
        has_rows: Whether a version of the table has such rows.
        actor: Who acts, for the table `audit`.
        reason: Why the rows must go.
        at: The time now.

    Returns:
        The names of the marked snapshots.
    """
    marked = []
    for snapshot in snapshots(store):
        version = snapshot.versions.get(table)
        if version is None or not snapshot.is_held(at=at):
            continue
        why = reason
        try:
            if not has_rows(version):
                continue
        except (ServiceUnavailable, duckdb.Error, OSError):
            files = TableFiles(store, table).all()
            if files_of_version(store, table, version=version, files=files) is not None:
                raise
            why = GONE
        mark_snapshot(store, snapshot, actor=actor, reason=why, at=at)
        marked.append(snapshot.name)
    return marked


def hold(
    store: DeltaStore, name: str, *, versions: Mapping[str, int], at: datetime, for_s: float
) -> Snapshot:
    """Hold versions for a process; it calls this again when it repeats its work.

    The hold expires `for_s` seconds after `at`, so that a dead process does not hold them forever.

    Returns:
        The newest state. If the hold was marked before, it is in state `mark` and holds nothing.
    """
    latest = find(store, name)
    if latest is not None and latest.action == "mark":
        return latest
    held = Snapshot(
        name=name, action="create", versions=dict(versions), actor=name, reason="while it runs",
        expires_at=at + timedelta(seconds=for_s), acted_at=_after(latest, at),
    )  # fmt: skip
    store.append(TABLE, to_table([_row(held)]))
    return held


def release(store: DeltaStore, name: str, *, at: datetime) -> None:
    """End a hold; does nothing if it has ended."""
    latest = find(store, name)
    if latest is not None and latest.is_held(at=at):
        _append(store, latest, "drop", actor=name, reason="done", at=at)


def _change(
    store: DeltaStore, latest: Snapshot, action: Action, *, actor: str, reason: str, at: datetime
) -> Snapshot:
    changed = _append(store, latest, action, actor=actor, reason=reason, at=at)
    _audit(store, changed)
    return changed


def _append(
    store: DeltaStore, latest: Snapshot, action: Action, *, actor: str, reason: str, at: datetime
) -> Snapshot:
    changed = Snapshot(
        name=latest.name, action=action, versions=latest.versions, actor=actor, reason=reason,
        expires_at=latest.expires_at, acted_at=_after(latest, at),
    )  # fmt: skip
    store.append(TABLE, to_table([_row(changed)]))
    return changed


def _after(latest: Snapshot | None, at: datetime) -> datetime:
    """A time after the latest row, so that the new row counts even if a clock is behind."""
    return at if latest is None else max(at, latest.acted_at + timedelta(microseconds=1))


def _row(snapshot: Snapshot) -> SnapshotRow:
    return SnapshotRow(
        name=snapshot.name,
        action=snapshot.action,
        versions=json.dumps(snapshot.versions, sort_keys=True),
        actor=snapshot.actor,
        reason=snapshot.reason,
        expires_at=snapshot.expires_at,
        acted_at=snapshot.acted_at,
        ingest_date=snapshot.acted_at.date(),
    )


def _audit(store: DeltaStore, snapshot: Snapshot) -> None:
    record_act(
        store,
        actor=snapshot.actor,
        action=f"snapshot.{snapshot.action}",
        subject=snapshot.name,
        detail={"reason": snapshot.reason, "versions": snapshot.versions},
        at=snapshot.acted_at,
    )


def _taken(held: Snapshot) -> ConfigError:
    return ConfigError(
        f"snapshot {held.name!r} exists since {held.acted_at:%Y-%m-%d %H:%M} by {held.actor}; "
        "drop it first or choose another name"
    )


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"there is no snapshot {name!r}; `onlinerl snapshot list` shows all names")
