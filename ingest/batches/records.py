"""Turns events into rows, as Arrow tables, and broken records into dead letters."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa

from onlinerl.ingest.batches.columns import column, constant, field_getter
from onlinerl.ingest.decoding.contract import all_usable, why_untrainable
from onlinerl.ingest.decoding.reading import Event
from onlinerl.ingest.event_log.log import LogRecord
from onlinerl.rollout_store.policy_version import PolicyVersion
from onlinerl.rollout_store.schema import Completion, DeadLetterRow, FeedbackRow, InteractionRow
from onlinerl.rollout_store.tables.rows import schema_of


class DecodedRecord(NamedTuple):
    """A record and the event in it."""

    record: LogRecord
    event: Event


def interaction_table(decoded: Sequence[DecodedRecord], *, ingested_at: datetime) -> pa.Table:
    """One row per completion, in the order of the events.

    Raises:
        ValueError, OverflowError, TypeError: A column cannot hold a value.
    """
    places = [(one, at) for one in decoded for at in range(len(one.event.body.choices))]
    owners = [one.event.body for one, _ in places]
    choices = [one.event.body.choices[at] for one, at in places]
    extras = [one.event.extra[at] if one.event.extra else None for one, at in places]
    records = [one.record for one, _ in places]
    check_logprobs = not all_usable(choices)
    reasons = [
        why_untrainable(body, choice, extra=extra, check_logprobs=check_logprobs)
        for body, choice, extra in zip(owners, choices, extras, strict=True)
    ]
    known: dict[str, Sequence[Any]] = {
        "trainable": [reason is None for reason in reasons],
        "untrainable_reason": reasons,
        "policy_version": [
            _last_version(body.policy, choice) for body, choice in zip(owners, choices, strict=True)
        ],
        "extra": extras,
    }
    known |= {name: _values(choices, name) for name in Completion.model_fields}
    return _table(InteractionRow, owners, records, known, ingested_at)


def feedback_table(decoded: Sequence[DecodedRecord], *, ingested_at: datetime) -> pa.Table:
    """One row per event.

    Raises:
        ValueError, OverflowError, TypeError: A column cannot hold a value.
    """
    bodies = [one.event.body for one in decoded]
    extras = [one.event.extra[0] if one.event.extra else None for one in decoded]
    records = [one.record for one in decoded]
    return _table(FeedbackRow, bodies, records, {"extra": extras}, ingested_at)


def dead_letter(record: LogRecord, *, reason: str, ingested_at: datetime) -> DeadLetterRow:
    """The row that keeps a broken record byte for byte."""
    return DeadLetterRow(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=reason,
        key=record.key,
        payload=record.value,
        ingested_at=ingested_at,
        ingest_date=ingested_at.date(),
    )


def _last_version(policy: str, choice: Any) -> int | None:  # noqa: ANN401 - a generated struct
    """Number of the policy version that sampled the last token; None when it is not known."""
    if not choice.version_spans:
        return None
    version = PolicyVersion.find(choice.version_spans[-1].version, policy=policy)
    return None if version is None else version.number


def _values(structs: Sequence[Any], name: str) -> list[Any]:
    return list(map(field_getter(name), structs))


def _table(
    row_type: type[InteractionRow] | type[FeedbackRow],
    bodies: Sequence[Any],
    records: Sequence[LogRecord],
    known: Mapping[str, Sequence[Any]],
    ingested_at: datetime,
) -> pa.Table:
    stamps = {"ingested_at": ingested_at, "ingest_date": ingested_at.date()}
    origins = ("topic", "partition", "offset")
    arrays = []
    for field in schema_of(row_type):
        if field.name in stamps:
            arrays.append(constant(stamps[field.name], field.type, len(bodies)))
            continue
        values = known.get(field.name)
        if values is None:
            values = _values(records if field.name in origins else bodies, field.name)
        arrays.append(column(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema_of(row_type))
