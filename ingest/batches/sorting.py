"""Sorts the records of one topic: new rows, dead letters, and records that are skipped."""

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
    """Turns events into rows."""

    def __call__(self, decoded: Sequence[DecodedRecord], *, ingested_at: datetime) -> pa.Table:
        """The rows, in the order of the events.

        Raises:
            ValueError, OverflowError, TypeError: A column cannot hold a value.
        """
        ...


@dataclass(frozen=True)
class Route:
    """The way from a topic into its table."""

    topic: str
    id_column: str
    model: EventModel
    table_of: TableOf

    @property
    def table(self) -> str:
        """Name of the table."""
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
    """Keys and lengths of the events in `rows`."""
    dead: Sequence[DeadLetterRow]
    dead_by_kind: dict[Kind, int]
    ends: dict[Partition, int]
    """The offset after the last record of each partition, from which reading goes on."""
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
    """Decode every record; one that cannot be read or stored becomes a dead letter.

    An event is skipped as a repeat when it is in `recent` or came earlier in the same batch.

    Args:
        route: The topic of all records.
        records: In the order of the log.
        recent: The newest events of the table.
        ingested_at: The time for the column of that name.
        vocab_size: Token ids are below it; 0 when it is not known.
    """
    sorter = _Sorter(route, recent, ingested_at)
    sorter.read(records)
    if route.model is InteractionEvent:
        sorter.check_interactions(vocab_size)
    sorter.drop_repeats()
    rows = sorter.table()
    return Batch(
        rows=rows,
        events=tuple(sorter.events.items()),
        dead=sorted(sorter.dead, key=lambda row: (row.partition, row.offset)),
        dead_by_kind=sorter.dead_by_kind,
        ends={(record.topic, record.partition): record.offset + 1 for record in records},
        num_repeated=sorter.num_repeated,
        num_withheld=sorter.num_withheld,
    )


@dataclass
class _Sorter:
    route: Route
    recent: RecentEvents
    ingested_at: datetime
    decoded: list[DecodedRecord] = field(default_factory=list)
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
                self._refuse(record, error)
                continue
            if event is None:
                self.num_withheld += 1
            else:
                self.decoded.append(DecodedRecord(record, event))

    def check_interactions(self, vocab_size: int) -> None:
        self._keep(check_shape)
        if not all_in_vocabulary([one.event.body for one in self.decoded], vocab_size):
            self._keep(lambda body: check_vocabulary(body, vocab_size))

    def drop_repeats(self) -> None:
        """Drop repeats and check prefixes, in order: a parent may be in the same batch."""
        decoded, self.decoded = self.decoded, []
        has_tokens = self.route.model is InteractionEvent
        for one in decoded:
            body = one.event.body
            key = event_key(body.tenant, getattr(body, self.route.id_column))
            if key in self.recent or key in self.events:
                self.num_repeated += 1
                continue
            if has_tokens and body.prefix_length and not self._fits_its_parent(one):
                continue
            self.events[key] = _lengths(body) if has_tokens else 0
            self.decoded.append(one)

    def table(self) -> pa.Table:
        try:
            return self._table(self.decoded)
        except (ValueError, OverflowError, TypeError):
            # A column cannot hold a value: convert event by event to find out whose it is.
            decoded, self.decoded = self.decoded, []
            for one in decoded:
                try:
                    self._table([one])
                except (ValueError, OverflowError, TypeError) as error:
                    reason = f"a value does not fit its column: {error}"[:1000]
                    self._refuse(one.record, BrokenEvent(Kind.VALUE, reason))
                    body = one.event.body
                    del self.events[event_key(body.tenant, getattr(body, self.route.id_column))]
                else:
                    self.decoded.append(one)
            return self._table(self.decoded)

    def _table(self, decoded: Sequence[DecodedRecord]) -> pa.Table:
        return self.route.table_of(decoded, ingested_at=self.ingested_at)

    def _keep(self, check: Callable[[Any], None]) -> None:
        decoded, self.decoded = self.decoded, []
        for one in decoded:
            try:
                check(one.event.body)
            except BrokenEvent as error:
                self._refuse(one.record, error)
            else:
                self.decoded.append(one)

    def _fits_its_parent(self, one: DecodedRecord) -> bool:
        body = one.event.body
        if body.parent_id is None:
            return True
        parent = event_key(body.tenant, body.parent_id)
        lengths = self.events.get(parent) or self.recent.lengths(parent)
        try:
            check_prefix(body, length_of(lengths, body.parent_choice))
        except BrokenEvent as error:
            self._refuse(one.record, error)
            return False
        return True

    def _refuse(self, record: LogRecord, error: BrokenEvent) -> None:
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
