"""A connection on tables that hold given events."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import duckdb

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.schema import FeedbackEvent, InteractionEvent
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.views.connection import connect
from tests.events import feedback_row, interaction_rows

Event = InteractionEvent | FeedbackEvent


def stored(folder: Path, events: Sequence[Event]) -> DeltaStore:
    """Tables with these events, each at an offset of its own."""
    store = DeltaStore(str(folder / "store"))
    store.create()
    interactions = [
        row
        for offset, e in enumerate(events)
        if isinstance(e, InteractionEvent)
        for row in interaction_rows(e, offset=offset)
    ]
    feedback = [
        feedback_row(e, offset=offset)
        for offset, e in enumerate(events)
        if isinstance(e, FeedbackEvent)
    ]
    if interactions:
        store.append("interactions", to_table(interactions))
    if feedback:
        store.append("feedback", to_table(feedback))
    return store


def views_of(
    folder: Path,
    *events: Event,
    rewards: RewardsConfig | None = None,
    as_of: datetime | None = None,
) -> duckdb.DuckDBPyConnection:
    """The views on these events."""
    return connect(stored(folder, events), rewards=rewards or RewardsConfig(), as_of=as_of)
