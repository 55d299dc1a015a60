"""The newest events of a table, to recognise repeats and to check prefixes against parents."""

import itertools
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NewType

import pyarrow as pa
import pyarrow.compute as pc

from onlinerl.rollout_store.tables.delta_store import DeltaStore

EventKey = NewType("EventKey", str)
Lengths = int | Mapping[int, int]
"""Tokens of prompt and completion together: an int for an event whose only choice is 0, else by
choice."""

_LENGTHS_BYTES = 128 * 1024**2
"""Most bytes of files that are read for lengths, which need the token columns."""

_BATCH_ROWS = 4096


def event_key(tenant: str, event_id: str) -> EventKey:
    """Identifies an event. Tenants cannot use up each other's ids."""
    return EventKey(f"{len(tenant)}:{tenant}{event_id}")


def length_of(lengths: Lengths, choice: int) -> int | None:
    """Tokens of prompt and completion of one choice; None when not known."""
    if isinstance(lengths, int):
        return lengths if choice == 0 else None
    return lengths.get(choice)


class RecentEvents:
    """Events by key, with their lengths; the oldest are forgotten beyond `capacity`."""

    def __init__(self, capacity: int, events: Iterable[tuple[EventKey, Lengths]] = ()) -> None:
        self._capacity = capacity
        self._events: dict[EventKey, Lengths] = {}
        self.add(events)

    def __contains__(self, key: EventKey) -> bool:
        return key in self._events

    def __len__(self) -> int:
        return len(self._events)

    def lengths(self, key: EventKey) -> Lengths:
        """The lengths of an event; empty when not known."""
        return self._events.get(key, {})

    def add(self, events: Iterable[tuple[EventKey, Lengths]]) -> None:
        """Add events and forget the oldest beyond the capacity. A repeat keeps its age."""
        for key, lengths in events:
            self._events.setdefault(key, lengths)
        excess = max(len(self._events) - self._capacity, 0)
        for oldest in list(itertools.islice(self._events, excess)):
            del self._events[oldest]


def stored_events(
    store: DeltaStore, table: str, *, id_column: str, capacity: int, with_lengths: bool = False
) -> RecentEvents:
    """The newest events of a table.

    Only the newest files are read, as far as the statistics in the table's log allow. Lengths are
    read from fewer files still; those of other events stay unknown.

    Args:
        store: Holds the table.
        table: Name of the table.
        id_column: Column with the event's own id.
        capacity: How many events to remember.
        with_lengths: Whether the rows have tokens.
    """
    since, lengths_since = _since(store, table, capacity=capacity)
    rows = _newest(_read(store, table, ["tenant", id_column], since=since), capacity)
    keys = map(event_key, rows["tenant"].to_pylist(), rows[id_column].to_pylist())
    lengths = _lengths(store, table, id_column, since=lengths_since) if with_lengths else {}
    return RecentEvents(capacity, ((key, lengths.get(key, {})) for key in reversed(list(keys))))


def _lengths(
    store: DeltaStore, table: str, id_column: str, *, since: datetime | None
) -> dict[EventKey, Lengths]:
    lengths: dict[EventKey, dict[int, int]] = {}
    if since is None:
        return {}
    lists = ("prompt_token_ids", "completion_token_ids")
    columns = ["tenant", id_column, "choice_index", "prefix_length", *lists]
    rows = _read(store, table, columns, since=since, lengths_of=lists)
    totals = pc.add(pc.add(rows["prefix_length"], rows[lists[0]]), rows[lists[1]])
    names = zip(rows["tenant"].to_pylist(), rows[id_column].to_pylist(), strict=True)
    places = zip(rows["choice_index"].to_pylist(), totals.to_pylist(), strict=True)
    for (tenant, event_id), (choice, total) in zip(names, places, strict=True):
        lengths.setdefault(event_key(tenant, event_id), {})[choice] = total
    return {key: by[0] if list(by) == [0] else by for key, by in lengths.items()}


def _since(
    store: DeltaStore, table: str, *, capacity: int
) -> tuple[datetime | None, datetime | None]:
    """Earliest `ingested_at` of ids and of lengths to read. None: all ids, and no lengths."""
    actions = pa.table(store.delta(table).get_add_actions(flatten=True))
    needed = {"num_records", "size_bytes", "min.ingested_at", "max.ingested_at"}
    if not actions.num_rows or not needed <= set(actions.column_names):
        return None, None
    files = actions.select(sorted(needed)).to_pylist()
    if any(file[name] is None for file in files for name in needed):
        return None, None
    files.sort(key=lambda file: file["max.ingested_at"], reverse=True)
    num_rows = num_bytes = 0
    since: datetime | None = None
    lengths_since: datetime | None = None
    for file in files:
        if num_rows >= capacity:
            break
        num_rows += file["num_records"]
        num_bytes += file["size_bytes"]
        since = min(since or file["min.ingested_at"], file["min.ingested_at"])
        if num_bytes <= _LENGTHS_BYTES:
            lengths_since = since
    return since, lengths_since


def _read(
    store: DeltaStore,
    table: str,
    columns: list[str],
    *,
    since: datetime | None,
    lengths_of: Iterable[str] = (),
) -> pa.Table:
    """Columns of the rows since then, read in small pieces; columns in `lengths_of` as lengths."""
    scanner = store.dataset(table).scanner(
        columns=[*columns, "ingested_at", "offset"],
        filter=None if since is None else pc.field("ingested_at") >= pa.scalar(since),
        batch_size=_BATCH_ROWS,
        batch_readahead=2,
        fragment_readahead=1,
    )
    pieces = []
    for batch in scanner.to_batches():
        piece = pa.Table.from_batches([batch])
        for name in lengths_of:
            at = piece.schema.get_field_index(name)
            piece = piece.set_column(at, name, pc.list_value_length(piece[name]))
        pieces.append(piece)
    if not pieces:
        empty = scanner.projected_schema.empty_table()
        return empty
    return pa.concat_tables(pieces)


def _newest(rows: pa.Table, count: int) -> pa.Table:
    order = [("ingested_at", "descending"), ("offset", "descending")]
    return rows.take(pc.select_k_unstable(rows, count, order)) if rows.num_rows else rows
