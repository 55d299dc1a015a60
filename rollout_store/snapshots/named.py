"""Named versions of all tables that can be read again later, row for row.

The table `snapshots` is append-only and the newest row of a name counts:

    create -> drop      by a person, or a cycle that ended
    create -> mark      rows or files of it are gone: it cannot be read any more
    create -> (expired) `expires_at` has passed

What a snapshot in state `create` names is never vacuumed; see `pins`. Names that contain a slash
belong to processes, e.g. `cycle/…`, and expire by themselves.
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
"""Why a snapshot is marked that can never be read again."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NEWEST = """
SELECT name, action, versions, actor, reason, expires_at, acted_at FROM stored
QUALIFY row_number() OVER (PARTITION BY name ORDER BY
    (contains(name, '/') AND action = 'mark') DESC, acted_at DESC, action = 'mark' DESC) = 1
ORDER BY acted_at, name
"""
"""A mark must not be overlooked: it wins over what was written in the same instant, and that of a
process's hold is final, for the process may repeat its hold while the mark is written."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The newest row of a name."""

    name: str
    action: Action
    versions: Mapping[str, int]
    actor: str
    reason: str
    expires_at: datetime | None
    acted_at: datetime

    def is_held(self, *, at: datetime) -> bool:
        """Whether its versions must stay readable."""
        return self.action == "create" and (self.expires_at is None or at < self.expires_at)


def snapshots(store: DeltaStore) -> list[Snapshot]:
    """Every name that was ever used, in its newest state, oldest first."""
    if not store.exists(TABLE):
        return []
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("stored", store.dataset(TABLE))
        rows = connection.sql(_NEWEST).to_arrow_table().to_pylist()
    return [Snapshot(**{**row, "versions": json.loads(row["versions"])}) for row in rows]


def find(store: DeltaStore, name: str) -> Snapshot | None:
    """The newest state of a name, whatever it is."""
    return next((each for each in snapshots(store) if each.name == name), None)


def readable(store: DeltaStore, name: str, *, at: datetime) -> Snapshot:
    """The snapshot, if its rows can be read.

    Raises:
        ConfigError: there is none of that name, or it holds nothing any more; says why.
    """
    found = find(store, name)
    if found is None:
        raise ConfigError(f"there is no snapshot {name!r}; `onlinerl snapshot list` names those")
    if found.is_held(at=at):
        return found
    if found.action == "mark":
        raise ConfigError(
            f"snapshot {name!r} cannot be read since {found.acted_at:%Y-%m-%d %H:%M}: "
            f"{found.reason}; create a new one"
        )
    ended = found.expires_at if found.action == "create" else found.acted_at
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
    found = find(store, name)
    if found is not None and found.is_held(at=at):
        raise _taken(found)
    # Of two that create the same name at once, one stores the number that it read before it looked.
    claim = Transaction(app_id=app_id, version=(number or 0) + 1, expected=number)
    held = Snapshot(
        name=name, action="create", versions=store.versions(), actor=actor, reason=reason,
        expires_at=None, acted_at=_after(found, at),
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
    """Hold its versions no longer; dropping what is dropped changes nothing.

    Raises:
        ConfigError: there is no snapshot of that name.
    """
    found = find(store, name)
    if found is None:
        raise ConfigError(f"there is no snapshot {name!r}; `onlinerl snapshot list` names those")
    if found.action == "drop":
        return found
    return _change(store, found, "drop", actor=actor, reason=reason, at=at)


def mark_snapshot(
    store: DeltaStore, held: Snapshot, *, actor: str, reason: str, at: datetime
) -> Snapshot:
    """Rows in it are gone: it can neither be read nor holds anything from now on."""
    return _change(store, held, "mark", actor=actor, reason=reason, at=at)


def mark_where(
    store: DeltaStore,
    table: str,
    is_in: Callable[[int], bool],
    *,
    actor: str,
    reason: str,
    at: datetime,
) -> list[str]:
    """Mark what holds a version of a table of which `is_in` is true; returns the names.

    What can never be read again is marked as well: it would fail this look at it for good.
    """
    marked = []
    for snapshot in snapshots(store):
        version = snapshot.versions.get(table)
        if version is None or not snapshot.is_held(at=at):
            continue
        why = reason
        try:
            if not is_in(version):
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
    """Hold versions for a process, and again whenever it repeats its work.

    The hold lapses `for_s` seconds from now: a process that died holds nothing forever.

    Returns:
        The newest state: not in state `create` when the hold was marked before.
    """
    found = find(store, name)
    if found is not None and found.action == "mark":
        return found
    held = Snapshot(
        name=name, action="create", versions=dict(versions), actor=name, reason="while it runs",
        expires_at=at + timedelta(seconds=for_s), acted_at=_after(found, at),
    )  # fmt: skip
    store.append(TABLE, to_table([_row(held)]))
    return held


def release(store: DeltaStore, name: str, *, at: datetime) -> None:
    """End a hold; idempotent."""
    found = find(store, name)
    if found is not None and found.is_held(at=at):
        _append(store, found, "drop", actor=name, reason="done", at=at)


def _change(
    store: DeltaStore, found: Snapshot, action: Action, *, actor: str, reason: str, at: datetime
) -> Snapshot:
    changed = _append(store, found, action, actor=actor, reason=reason, at=at)
    _audit(store, changed)
    return changed


def _append(
    store: DeltaStore, found: Snapshot, action: Action, *, actor: str, reason: str, at: datetime
) -> Snapshot:
    changed = Snapshot(
        name=found.name, action=action, versions=found.versions, actor=actor, reason=reason,
        expires_at=found.expires_at, acted_at=_after(found, at),
    )  # fmt: skip
    store.append(TABLE, to_table([_row(changed)]))
    return changed


def _after(found: Snapshot | None, at: datetime) -> datetime:
    """The newest row counts, also when the clocks of two machines differ or one went back."""
    return at if found is None else max(at, found.acted_at + timedelta(microseconds=1))


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


def _taken(found: Snapshot) -> ConfigError:
    return ConfigError(
        f"snapshot {found.name!r} exists since {found.acted_at:%Y-%m-%d %H:%M} by {found.actor}; "
        "drop it first or choose another name"
    )
