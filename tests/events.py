"""Builders of events and rows with overrides, for tests of every folder."""

from datetime import UTC, datetime, timedelta

from onlinerl.rollout_store.schema import (
    Completion,
    FeedbackEvent,
    FeedbackRow,
    InteractionEvent,
    InteractionRow,
    RendererName,
    Sampling,
    VersionSpan,
)

NOON = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


def completion(token_ids: list[int] | None = None, **changes: object) -> Completion:
    """One choice; logprobs are -0.5 each and the whole of it was sampled by `assistant/1`."""
    ids = [7, 8] if token_ids is None else token_ids
    spans = [VersionSpan(version="assistant/1", start=0, end=len(ids))] if ids else []
    fields: dict[str, object] = {
        "completion_token_ids": ids,
        "logprobs": [-0.5] * len(ids),
        "finish_reason": "stop",
        "version_spans": spans,
    }
    return Completion.model_validate(fields | changes)


def interaction(interaction_id: str = "i1", **changes: object) -> InteractionEvent:
    """An event of one root request with prompt 1 2 3 and completion 7 8, consent `train`."""
    fields: dict[str, object] = {
        "interaction_id": interaction_id,
        "session_id": "s1",
        "prompt_token_ids": [1, 2, 3],
        "policy": "assistant",
        "sampling": Sampling(temperature=0.7),
        "renderer": RendererName(name="chatml", hash="00"),
        "tenant": "acme",
        "consent": "train",
        "served_at": NOON,
        "choices": [completion()],
    }
    return InteractionEvent.model_validate(fields | changes)


def feedback(feedback_id: str = "f1", **changes: object) -> FeedbackEvent:
    """An event that says `accepted` = 1 about interaction `i1`."""
    fields: dict[str, object] = {
        "feedback_id": feedback_id,
        "metric": "accepted",
        "value": 1.0,
        "tenant": "acme",
        "given_at": NOON,
    }
    if not {"interaction_id", "session_id"} & set(changes):
        fields["interaction_id"] = "i1"
    return FeedbackEvent.model_validate(fields | changes)


def after(minutes: float) -> datetime:
    """That many minutes after noon."""
    return NOON + timedelta(minutes=minutes)


def interaction_rows(event: InteractionEvent, **changes: object) -> list[InteractionRow]:
    """The rows that ingest makes of an event, one per choice."""
    shared = event.model_dump(exclude={"choices", "schema_version"})
    return [
        InteractionRow.model_validate(
            shared | choice.model_dump() | _origin("interactions", changes)
        )
        for choice in event.choices
    ]


def feedback_row(event: FeedbackEvent, **changes: object) -> FeedbackRow:
    """The row that ingest makes of an event."""
    shared = event.model_dump(exclude={"schema_version"})
    return FeedbackRow.model_validate(shared | _origin("feedback", changes))


def _origin(table: str, changes: dict[str, object]) -> dict[str, object]:
    fields: dict[str, object] = {
        "topic": f"onlinerl.{table}",
        "partition": 0,
        "offset": 0,
        "ingested_at": NOON,
        "ingest_date": NOON.date(),
    }
    return fields | changes
