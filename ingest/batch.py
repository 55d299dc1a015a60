"""Records of one topic sorted into what is stored: new rows, dead letters, and what is skipped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa

from onlinerl.errors import InvalidEvent
from onlinerl.ingest.log import LogRecord, Partition
from onlinerl.ingest.recent import EventId, RecentIds
from onlinerl.ingest.records import dead_letter, feedback_rows, interaction_rows
from onlinerl.rollout_store.rows import to_table
from onlinerl.rollout_store.schema import (
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    TABLES,
    DeadLetterRow,
    FeedbackRow,
    InteractionRow,
)

Row = InteractionRow | FeedbackRow


@dataclass(frozen=True)
class Route:
    """Which table a topic fills, and how."""

    topic: str
    table: str
    id_column: str
    parse: Callable[..., Sequence[Row]]
    """`parse(record, ingested_at=...)`; raises `InvalidEvent`."""


ROUTES = (
    Route(INTERACTIONS_TOPIC, "interactions", "interaction_id", interaction_rows),
    Route(FEEDBACK_TOPIC, "feedback", "feedback_id", feedback_rows),
)


@dataclass(frozen=True)
class Batch:
    """Records of one topic, sorted."""

    rows: pa.Table
    ids: Sequence[EventId]
    """Of the events in `rows`."""
    dead: Sequence[DeadLetterRow]
    ends: dict[Partition, int]
    """Per partition the offset after its last record: where reading goes on."""
    num_repeated: int
    num_withheld: int
    num_untrainable: int


@dataclass
class _Sorting:
    rows: list[Row] = field(default_factory=list)
    ids: dict[EventId, None] = field(default_factory=dict)
    dead: list[DeadLetterRow] = field(default_factory=list)
    num_repeated: int = 0
    num_withheld: int = 0


def sort_records(
    route: Route, records: Sequence[LogRecord], *, recent: RecentIds, ingested_at: datetime
) -> Batch:
    """Parse every record; one that cannot be read or stored becomes a dead letter.

    An event counts as repeated when its id is in `recent` or came earlier in the same batch.
    """
    sorting = _sort(route, records, recent, ingested_at, check_each=False)
    row_type = TABLES[route.table]
    try:
        table = to_table(sorting.rows, row_type=row_type)
    except (ValueError, OverflowError, TypeError):
        # A value that no column can hold, e.g. a number beyond 64 bit: find whose it is.
        sorting = _sort(route, records, recent, ingested_at, check_each=True)
        table = to_table(sorting.rows, row_type=row_type)
    ends: dict[Partition, int] = {}
    for record in records:
        ends[record.topic, record.partition] = record.offset + 1
    return Batch(
        rows=table,
        ids=tuple(sorting.ids),
        dead=sorting.dead,
        ends=ends,
        num_repeated=sorting.num_repeated,
        num_withheld=sorting.num_withheld,
        num_untrainable=sum(not getattr(row, "trainable", True) for row in sorting.rows),
    )


def _sort(
    route: Route,
    records: Sequence[LogRecord],
    recent: RecentIds,
    ingested_at: datetime,
    *,
    check_each: bool,
) -> _Sorting:
    result = _Sorting()
    for record in records:
        try:
            rows = route.parse(record, ingested_at=ingested_at)
            if check_each and rows:
                _check_storable(rows)
        except InvalidEvent as error:
            result.dead.append(dead_letter(record, reason=str(error), ingested_at=ingested_at))
            continue
        _take(route, rows, recent, result)
    return result


def _take(route: Route, rows: Sequence[Row], recent: RecentIds, result: _Sorting) -> None:
    if not rows:
        result.num_withheld += 1
        return
    event_id = (rows[0].tenant, str(getattr(rows[0], route.id_column)))
    if event_id in recent or event_id in result.ids:
        result.num_repeated += 1
        return
    result.ids[event_id] = None
    result.rows.extend(rows)


def _check_storable(rows: Sequence[Row]) -> None:
    try:
        to_table(rows)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidEvent(f"a value does not fit its column: {error}"[:1000]) from error
