"""The newest ids of a table, to recognise an event that arrives again."""

import itertools
from collections.abc import Iterable

import duckdb

from onlinerl.rollout_store.store import DeltaStore

EventId = tuple[str, str]
"""Tenant and the event's own id: no tenant can take an id away from another."""


class RecentIds:
    """A set that forgets its oldest members beyond `capacity`."""

    def __init__(self, capacity: int, ids: Iterable[EventId] = ()) -> None:
        self._capacity = capacity
        self._ids: dict[EventId, None] = {}
        self.add(ids)

    def __contains__(self, event_id: EventId) -> bool:
        return event_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: Iterable[EventId]) -> None:
        """Remember these; the oldest are forgotten first. A repeat keeps its place."""
        for event_id in ids:
            self._ids.setdefault(event_id)
        excess = max(len(self._ids) - self._capacity, 0)
        for oldest in list(itertools.islice(self._ids, excess)):
            del self._ids[oldest]


def stored_ids(store: DeltaStore, table: str, *, id_column: str, capacity: int) -> RecentIds:
    """The newest ids that the table holds."""
    with duckdb.connect(":memory:") as connection:
        connection.register("stored", store.dataset(table))
        newest = connection.execute(
            f'SELECT tenant, "{id_column}" FROM stored'
            ' ORDER BY ingested_at DESC, "offset" DESC LIMIT ?',
            [capacity],
        ).fetchall()
    return RecentIds(capacity, reversed(newest))
