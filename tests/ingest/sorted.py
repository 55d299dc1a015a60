"""Sorts single records as ingest does, for tests of single events."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from onlinerl.errors import InvalidEvent
from onlinerl.ingest.batches.recent import RecentEvents
from onlinerl.ingest.batches.sorting import ROUTES, Batch, Route, sort_records
from onlinerl.ingest.event_log.log import LogRecord
from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC
from tests.events import NOON, feedback, interaction

INTERACTIONS, FEEDBACK = ROUTES


def record(value: bytes, *, topic: str = INTERACTIONS_TOPIC, offset: int = 41) -> LogRecord:
    """A record of partition 3."""
    return LogRecord(topic, 3, offset, b"s1", value)


def batch_of(
    *values: bytes,
    route: Route = INTERACTIONS,
    recent: RecentEvents | None = None,
    vocab_size: int = 0,
    ingested_at: datetime = NOON,
) -> Batch:
    """The batch that ingest makes of these records."""
    records = [record(v, topic=route.topic, offset=41 + n) for n, v in enumerate(values)]
    known = RecentEvents(100) if recent is None else recent
    return sort_records(
        route, records, recent=known, ingested_at=ingested_at, vocab_size=vocab_size
    )


def rows_of(*values: bytes, route: Route = INTERACTIONS, **options: Any) -> list[dict[str, Any]]:
    """The rows of valid records.

    Raises:
        InvalidEvent: One is a dead letter; the message is its reason.
    """
    batch = batch_of(*values, route=route, **options)
    if batch.dead:
        raise InvalidEvent(batch.dead[0].reason)
    rows: list[dict[str, Any]] = batch.rows.to_pylist()
    return rows


def edited(**changes: object) -> bytes:
    """An interaction in JSON with these fields changed or added."""
    return json.dumps(json.loads(interaction().model_dump_json()) | changes).encode()


def edited_feedback(**changes: object) -> bytes:
    """A feedback in JSON with these fields changed or added."""
    return json.dumps(json.loads(feedback().model_dump_json()) | changes).encode()


def with_choice(change: Callable[[dict[str, Any]], object]) -> bytes:
    """An interaction in JSON whose only choice `change` has edited."""
    raw = json.loads(interaction().model_dump_json())
    change(raw["choices"][0])
    return json.dumps(raw).encode()


def reasons_of(batch: Batch) -> Sequence[str]:
    """The reasons of the batch's dead letters."""
    return [row.reason for row in batch.dead]
