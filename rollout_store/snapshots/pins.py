"""Which table versions must stay readable."""

from collections import defaultdict
from datetime import datetime

from onlinerl.rollout_store.snapshots.named import snapshots
from onlinerl.rollout_store.tables.delta_store import DeltaStore


def held_versions(store: DeltaStore, *, at: datetime) -> dict[str, set[int]]:
    """The versions of each table that a snapshot or a running cycle holds at this time."""
    held: dict[str, set[int]] = defaultdict(set)
    for snapshot in snapshots(store):
        if snapshot.is_held(at=at):
            for table, version in snapshot.versions.items():
                held[table].add(version)
    return dict(held)
