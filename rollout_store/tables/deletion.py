"""Deletes rows by conditions that contain no id of a person."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from deltalake.exceptions import CommitFailedError

from onlinerl.errors import StoreConflict
from onlinerl.rollout_store.tables.delta_store import WRITER_PROPERTIES, DeltaStore, storage_errors
from onlinerl.rollout_store.tables.sql import literal

_ATTEMPTS = 20
_POSITIONS_PER_COMMIT = 1_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, order=True, kw_only=True)
class Position:
    """The origin of a row: unique within a table, and stored with every row that ingest writes.

    The log of a table keeps the condition of every deletion. A condition made of positions contains
    only a topic and numbers, and no id of a person or an interaction.
    """

    ingest_date: date
    topic: str
    partition: int
    ingested_at: datetime
    offset: int


def delete_where(store: DeltaStore, table: str, condition: str) -> int:
    """Delete the rows of the newest version that meet an SQL condition, in one commit.

    Returns:
        The number of deleted rows.

    Raises:
        StoreConflict: others kept changing the same files; nothing was deleted.
    """
    figures = until_committed(
        lambda: store.delta(table).delete(condition, writer_properties=WRITER_PROPERTIES),
        attempt=f"delete from table {table}",
    )
    return int(figures.get("num_deleted_rows", 0))


def until_committed(change: Callable[[], Mapping[str, Any]], *, attempt: str) -> Mapping[str, Any]:
    """Repeat a change of stored rows while others change the same files.

    Args:
        change: The change; it loads the newest version itself.
        attempt: What the change does, to complete the sentence "could not ...".

    Raises:
        StoreConflict: others kept changing the same files; nothing was changed.
    """
    for _ in range(_ATTEMPTS):
        try:
            with storage_errors(attempt):
                return change()
        except CommitFailedError:
            continue  # a compaction rewrote one of the files meanwhile
    raise StoreConflict(f"could not {attempt} in {_ATTEMPTS} attempts")


def delete_positions(store: DeltaStore, table: str, positions: Iterable[Position]) -> int:
    """Delete the rows with these positions; returns the number of deleted rows."""
    ordered = sorted(set(positions))
    return sum(
        delete_where(store, table, _condition(ordered[start : start + _POSITIONS_PER_COMMIT]))
        for start in range(0, len(ordered), _POSITIONS_PER_COMMIT)
    )


def _condition(positions: Sequence[Position]) -> str:
    days = ", ".join(literal(day.isoformat()) for day in sorted({p.ingest_date for p in positions}))
    return f"ingest_date IN ({days}) AND ({' OR '.join(_batches(positions))})"


def _batches(positions: Sequence[Position]) -> Iterator[str]:
    """One clause for each batch that ingest wrote."""
    offsets: dict[tuple[str, int, datetime], list[int]] = defaultdict(list)
    for each in positions:
        offsets[each.topic, each.partition, each.ingested_at].append(each.offset)
    for (topic, partition, ingested_at), numbers in offsets.items():
        yield (
            f'(topic = {literal(topic)} AND "partition" = {partition} '
            f"AND CAST(ingested_at AS BIGINT) = {microseconds(ingested_at)} "
            f'AND "offset" IN ({", ".join(map(str, numbers))}))'
        )


def microseconds(at: datetime) -> int:
    """Microseconds since 1970 in UTC: the form in which conditions compare times."""
    return (at - _EPOCH) // timedelta(microseconds=1)
