"""`onlinerl snapshot`: creates, lists and drops snapshots."""

import sys
from datetime import UTC, datetime

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.snapshots.named import (
    Snapshot,
    create_snapshot,
    drop_snapshot,
    snapshots,
)
from onlinerl.rollout_store.tables.delta_store import DeltaStore


def run_snapshot(
    store: DeltaStore, *, action: str, name: str | None, actor: str, reason: str
) -> int:
    """Run one of the actions `create`, `drop` and `list`, and print the resulting state.

    Raises:
        ConfigError: the name is missing, taken, unknown or malformed.
    """
    now = datetime.now(UTC)
    if action == "list":
        _show(snapshots(store), at=now)
        return 0
    if name is None:
        raise ConfigError(f"name the snapshot: onlinerl snapshot {action} NAME")
    change = create_snapshot if action == "create" else drop_snapshot
    snapshot = change(store, name, actor=actor, reason=reason, at=now)
    sys.stdout.write(f"snapshot {snapshot.name}: {_state(snapshot, at=now)}\n")
    return 0


def _state(snapshot: Snapshot, *, at: datetime) -> str:
    if snapshot.is_held(at=at):
        until = snapshot.expires_at
        return "held" if until is None else f"held until {until:%Y-%m-%d %H:%M}"
    states = {"create": "expired", "drop": "dropped", "mark": "erased rows were in it"}
    return states[snapshot.action]


def _show(listed: list[Snapshot], *, at: datetime) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "state", "since", "by", "reason", "interactions", "feedback")
    for snapshot in listed:
        table.add_row(
            snapshot.name,
            _state(snapshot, at=at),
            f"{snapshot.acted_at:%Y-%m-%d %H:%M}",
            snapshot.actor,
            snapshot.reason,
            str(snapshot.versions.get("interactions", "")),
            str(snapshot.versions.get("feedback", "")),
        )
    console = Console(width=None if sys.stdout.isatty() else 200, emoji=False)
    console.print(table, markup=False)
