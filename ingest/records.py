"""From a record of the log to rows, or to the reason why it has none.

What cannot be read is a dead letter. What can be read but misses something that learning needs is
kept and marked untrainable: it was served, so it is logged.
"""

import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from onlinerl.errors import InvalidEvent
from onlinerl.ingest.log import LogRecord
from onlinerl.rollout_store.schema import (
    SCHEMA_VERSION,
    Completion,
    DeadLetterRow,
    FeedbackEvent,
    FeedbackFields,
    FeedbackRow,
    InteractionEvent,
    InteractionFields,
    InteractionRow,
)

Event = TypeVar("Event", InteractionEvent, FeedbackEvent)
Fields = dict[str, Any]
"""Arguments of a pydantic model, which checks or was given checked values."""


def interaction_rows(record: LogRecord, *, ingested_at: datetime) -> list[InteractionRow]:
    """One row per choice; none for an event without consent to be logged.

    Raises:
        InvalidEvent: saying what is wrong, without repeating what the event contains.
    """
    event = _parse(InteractionEvent, record)
    if event.consent == "none":
        return []
    numbers = [choice.choice_index for choice in event.choices]
    if len(set(numbers)) < len(numbers):
        raise InvalidEvent(f"choice_index repeats: {numbers}")
    return [_interaction_row(event, choice, record, ingested_at) for choice in event.choices]


def feedback_rows(record: LogRecord, *, ingested_at: datetime) -> list[FeedbackRow]:
    """The one row of a feedback event.

    Raises:
        InvalidEvent: as for `interaction_rows`.
    """
    event = _parse(FeedbackEvent, record)
    return [
        FeedbackRow.model_construct(
            **_declared(event, FeedbackFields),
            **_origin(record, ingested_at),
            extra=_to_json(event.model_extra or {}),
        )
    ]


def dead_letter(record: LogRecord, *, reason: str, ingested_at: datetime) -> DeadLetterRow:
    """The row that keeps a record which broke the contract, byte for byte."""
    return DeadLetterRow(
        **_origin(record, ingested_at), reason=reason, key=record.key, payload=record.value
    )


def why_untrainable(event: InteractionEvent, choice: Completion) -> str | None:
    """What this completion misses that learning needs, or None."""
    num_tokens = len(choice.completion_token_ids)
    if not event.trainable:
        return event.untrainable_reason or "the gateway gave no reason"
    if event.parent_id is None and event.prefix_length:
        return "prefix_length without a parent"
    if not event.prompt_token_ids and not event.prefix_length:
        return "no prompt tokens"
    if len(choice.logprobs) != num_tokens:
        return f"{len(choice.logprobs)} logprobs for {num_tokens} tokens"
    if not all(map(math.isfinite, choice.logprobs)):
        return "a logprob is not finite"
    if not _tile(choice):
        return "version spans do not tile the completion"
    return None


def policy_version(policy: str, choice: Completion) -> int | None:
    """The number in `policy/12` of the last sampled token; None when it has another form."""
    if not choice.version_spans:
        return None
    name, _, number = choice.version_spans[-1].version.rpartition("/")
    # Nineteen digits do not fit the column, and no registry counts that far.
    known = name == policy and number.isascii() and number.isdigit() and len(number) < 19
    return int(number) if known else None


def _parse(event_type: type[Event], record: LogRecord) -> Event:
    if not record.value:
        raise InvalidEvent("the record is empty")
    try:
        event = event_type.model_validate_json(record.value)
    except ValidationError as error:
        raise InvalidEvent(_explain(error)) from None
    if event.schema_version != SCHEMA_VERSION:
        raise InvalidEvent(
            f"schema_version {event.schema_version} is not {SCHEMA_VERSION}, the one known here"
        )
    return event


def _explain(error: ValidationError) -> str:
    details = error.errors(include_input=False, include_context=False, include_url=False)
    shown = [f"{'.'.join(map(str, d['loc'])) or 'record'}: {d['msg']}" for d in details[:3]]
    more = [f"and {len(details) - 3} more"] if len(details) > 3 else []
    return "; ".join(shown + more)[:1000]


def _interaction_row(
    event: InteractionEvent, choice: Completion, record: LogRecord, ingested_at: datetime
) -> InteractionRow:
    reason = why_untrainable(event, choice)
    fields = (
        _declared(event, InteractionFields)
        | _declared(choice, Completion)
        | _origin(record, ingested_at)
        | {
            "trainable": reason is None,
            "untrainable_reason": reason,
            "policy_version": policy_version(event.policy, choice),
            "extra": _to_json(_unknown_fields(event, choice)),
        }
    )
    return InteractionRow.model_construct(**fields)


def _declared(model: BaseModel, row_part: type[BaseModel]) -> Fields:
    return {name: getattr(model, name) for name in row_part.model_fields}


def _origin(record: LogRecord, ingested_at: datetime) -> Fields:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "ingested_at": ingested_at,
        "ingest_date": ingested_at.date(),
    }


def _unknown_fields(event: InteractionEvent, choice: Completion) -> dict[str, object]:
    parts = {"choice": choice.model_extra, "sampling": event.sampling.model_extra}
    return (event.model_extra or {}) | {name: extra for name, extra in parts.items() if extra}


def _to_json(extra: Mapping[str, object]) -> str | None:
    return json.dumps(extra, sort_keys=True) if extra else None


def _tile(choice: Completion) -> bool:
    """Whether the spans cover the tokens from the first to the last, in order and without gaps."""
    at = 0
    for span in choice.version_spans:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    return at == len(choice.completion_token_ids)
