"""Records of one topic sorted into what is stored: new rows, dead letters, and what is skipped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa

from onlinerl.ingest.batches.recent import EventKey, Lengths, RecentEvents, event_key, length_of
from onlinerl.ingest.batches.records import (
    DecodedRecord,
    dead_letter,
    feedback_table,
    interaction_table,
)
from onlinerl.ingest.decoding.contract import (
    BrokenEvent,
    Kind,
    all_in_vocabulary,
    check_prefix,
    check_shape,
    check_vocabulary,
)
from onlinerl.ingest.decoding.reading import read_event
from onlinerl.ingest.decoding.unknown_fields import EventModel
from onlinerl.ingest.event_log.log import LogRecord, Partition
from onlinerl.rollout_store.event_log import TABLE_OF
from onlinerl.rollout_store.schema import (
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    DeadLetterRow,
    FeedbackEvent,
    InteractionEvent,
)


class TableOf(Protocol):
    """Makes rows of events."""

    def __call__(self, found: Sequence[DecodedRecord], *, ingested_at: datetime) -> pa.Table:
        """Rows in the order of the events; ValueError for a value that no column holds."""
        ...


@dataclass(frozen=True)
class Route:
    """Which table a topic fills, and how."""

    topic: str
    id_column: str
    model: EventModel
    table_of: TableOf

    @property
    def table(self) -> str:
        """Its name."""
        return TABLE_OF[self.topic]


ROUTES = (
    Route(INTERACTIONS_TOPIC, "interaction_id", InteractionEvent, interaction_table),
    Route(FEEDBACK_TOPIC, "feedback_id", FeedbackEvent, feedback_table),
)


@dataclass(frozen=True)
class Batch:
    """Records of one topic, sorted."""

    rows: pa.Table
    events: Sequence[tuple[EventKey, Lengths]]
    """Of the events in `rows`."""
    dead: Sequence[DeadLetterRow]
    dead_by_kind: dict[Kind, int]
    ends: dict[Partition, int]
    """Per partition the offset after its last record: where reading goes on."""
    num_repeated: int
    num_withheld: int


def sort_records(
    route: Route,
    records: Sequence[LogRecord],
    *,
    recent: RecentEvents,
    ingested_at: datetime,
    vocab_size: int = 0,
) -> Batch:
    """Read every record; one that cannot be read or stored becomes a dead letter.

    An event counts as repeated when it is in `recent` or came earlier in the same batch.

    Args:
        route: The topic that all records are of.
        records: In the order of the log.
        recent: What the table holds already.
        ingested_at: The time that rows are stamped with.
        vocab_size: Token ids are below it; 0 when it is not known.
    """
    sorting = _Sorting(route, recent, ingested_at)
    sorting.read(records)
    if route.model is InteractionEvent:
        sorting.check_interactions(vocab_size)
    sorting.leave_out_repeated()
    rows = sorting.table()
    return Batch(
        rows=rows,
        events=tuple(sorting.events.items()),
        dead=sorted(sorting.dead, key=lambda row: (row.partition, row.offset)),
        dead_by_kind=sorting.dead_by_kind,
        ends={(record.topic, record.partition): record.offset + 1 for record in records},
        num_repeated=sorting.num_repeated,
        num_withheld=sorting.num_withheld,
    )


@dataclass
class _Sorting:
    route: Route
    recent: RecentEvents
    ingested_at: datetime
    found: list[DecodedRecord] = field(default_factory=list)
    events: dict[EventKey, Lengths] = field(default_factory=dict)
    dead: list[DeadLetterRow] = field(default_factory=list)
    dead_by_kind: dict[Kind, int] = field(default_factory=dict)
    num_repeated: int = 0
    num_withheld: int = 0

    def read(self, records: Sequence[LogRecord]) -> None:
        for record in records:
            try:
                event = read_event(record.value, self.route.model)
            except BrokenEvent as error:
                self._bury(record, error)
                continue
            if event is None:
                self.num_withheld += 1
            else:
                self.found.append(DecodedRecord(record, event))

    def check_interactions(self, vocab_size: int) -> None:
        self._keep(check_shape)
        if not all_in_vocabulary([one.event.body for one in self.found], vocab_size):
            self._keep(lambda body: check_vocabulary(body, vocab_size))

    def leave_out_repeated(self) -> None:
        """In order, because the parent of an event may be in the same batch."""
        found, self.found = self.found, []
        has_tokens = self.route.model is InteractionEvent
        for one in found:
            body = one.event.body
            key = event_key(body.tenant, getattr(body, self.route.id_column))
            if key in self.recent or key in self.events:
                self.num_repeated += 1
                continue
            if has_tokens and body.prefix_length and not self._has_its_prefix(one):
                continue
            self.events[key] = _lengths(body) if has_tokens else 0
            self.found.append(one)

    def table(self) -> pa.Table:
        try:
            return self._table(self.found)
        except (ValueError, OverflowError, TypeError):
            # A value that no column can hold: find whose it is.
            found, self.found = self.found, []
            for one in found:
                try:
                    self._table([one])
                except (ValueError, OverflowError, TypeError) as error:
                    reason = f"a value does not fit its column: {error}"[:1000]
                    self._bury(one.record, BrokenEvent(Kind.VALUE, reason))
                    body = one.event.body
                    del self.events[event_key(body.tenant, getattr(body, self.route.id_column))]
                else:
                    self.found.append(one)
            return self._table(self.found)

    def _table(self, found: Sequence[DecodedRecord]) -> pa.Table:
        return self.route.table_of(found, ingested_at=self.ingested_at)

    def _keep(self, check: Callable[[Any], None]) -> None:
        found, self.found = self.found, []
        for one in found:
            try:
                check(one.event.body)
            except BrokenEvent as error:
                self._bury(one.record, error)
            else:
                self.found.append(one)

    def _has_its_prefix(self, one: DecodedRecord) -> bool:
        body = one.event.body
        if body.parent_id is None:
            return True
        parent = event_key(body.tenant, body.parent_id)
        lengths = self.events.get(parent) or self.recent.lengths(parent)
        try:
            check_prefix(body, length_of(lengths, body.parent_choice))
        except BrokenEvent as error:
            self._bury(one.record, error)
            return False
        return True

    def _bury(self, record: LogRecord, error: BrokenEvent) -> None:
        self.dead.append(dead_letter(record, reason=str(error), ingested_at=self.ingested_at))
        self.dead_by_kind[error.kind] = self.dead_by_kind.get(error.kind, 0) + 1


def _lengths(body: Any) -> Lengths:  # noqa: ANN401 - a generated struct
    num_prompt = body.prefix_length + len(body.prompt_token_ids) // 4
    first = body.choices[0]
    if len(body.choices) == 1 and first.choice_index == 0:
        return int(num_prompt + len(first.completion_token_ids) // 4)
    lengths: dict[int, int] = {
        choice.choice_index: num_prompt + len(choice.completion_token_ids) // 4
        for choice in body.choices
    }
    return lengths
