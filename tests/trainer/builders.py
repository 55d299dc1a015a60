"""Builders with overrides: rows, data, plans and tables for the trainer's tests."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from onlinerl.rollout_store.schema import (
    FeedbackRow,
    InteractionRow,
    PromotionRow,
    RendererName,
    Sampling,
    VersionSpan,
)
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.rollouts.advantages import Advantages
from onlinerl.trainer.rollouts.data import Datum, LossInputs
from onlinerl.trainer.rollouts.rows import WindowRow
from onlinerl.trainer.rollouts.segments import Segment, Span

START = datetime(2026, 11, 1, 12, tzinfo=UTC)

REWARDS = RewardsConfig(metrics=(MetricConfig(name="accepted", scale=2.0, offset=-1.0),))
"""1 becomes +1, 0 becomes -1."""


def row(number: int = 0, **changes: object) -> WindowRow:
    values: dict[str, object] = {
        "interaction_id": f"i{number:04d}",
        "choice_index": 0,
        "session_id": f"s{number:04d}",
        "tenant": "acme",
        "reward": 0.0,
        "version": 1,
        "temperature": 0.7,
        "num_sampled": 2,
        "served_at": START + timedelta(seconds=number),
    }
    return WindowRow.model_validate(values | changes)


def rows_with(rewards: Sequence[float], **changes: object) -> list[WindowRow]:
    return [row(number, reward=reward, **changes) for number, reward in enumerate(rewards)]


def segment(of: WindowRow, *, prompt: Sequence[int] = (5, 6), logprob: float = -1.0) -> Segment:
    sampled = list(range(10, 10 + of.num_sampled))
    return Segment(
        segment_id=f"{of.interaction_id}:{of.choice_index}",
        token_ids=np.array([*prompt, *sampled], dtype=np.int32),
        logprobs=np.array([np.nan] * len(prompt) + [logprob] * len(sampled), dtype=np.float32),
        loss_mask=np.array([0] * len(prompt) + [1] * len(sampled), dtype=np.int8),
        spans=[
            Span(
                interaction_id=of.interaction_id,
                choice_index=of.choice_index,
                start=len(prompt),
                end=len(prompt) + len(sampled),
            )
        ],
    )


def advantages_of(rows: Sequence[WindowRow], **changes: float) -> Advantages:
    values = {item.key: item.reward for item in rows}
    return Advantages(values=values, weights=dict.fromkeys(values, 1.0), baselines={}, **changes)


def datum(
    num_prompt: int = 3,
    num_sampled: int = 4,
    *,
    seed: int = 0,
    advantage: float = 1.0,
    weight: float = 1.0,
    temperature: float = 1.0,
    vocabulary: int = 40_000,
    off_mask: float = -math.inf,
) -> Datum:
    """Random tokens; everything off the mask holds values that would poison a loss."""
    length = num_prompt + num_sampled - 1
    random = np.random.default_rng(seed)
    tokens = random.integers(3, vocabulary, length + 1)
    mask = np.arange(length) >= num_prompt - 1

    def masked(value: float) -> np.ndarray:
        return np.where(mask, value, off_mask).astype(np.float32)

    return Datum(
        segment_id=f"segment-{seed}",
        row_keys=((f"i{seed:04d}", 0),),
        model_input=tokens[:-1],
        loss_fn_inputs=LossInputs(
            target_tokens=tokens[1:],
            mask=mask,
            logprobs=masked(-2.0),
            advantages=masked(advantage),
            weights=masked(weight),
            temperatures=masked(temperature),
            rows=np.where(mask, 0, -1).astype(np.int32),
        ),
    )


def plan(rows: Sequence[WindowRow] = (), **changes: object) -> Plan:
    values: dict[str, object] = {
        "policy": "assistant",
        "parent_version": 1,
        "base_model": "base",
        "table_versions": {},
        "rows": tuple(rows),
        "excluded": {},
        "baselines": {},
        "seed": 0,
        "trainer": TrainerConfig(),
        "rewards": REWARDS,
        "planned_at": START,
    }
    return Plan.model_validate(values | changes)


def interaction(number: int = 0, **changes: object) -> InteractionRow:
    """A stored completion of two sampled tokens in a session of its own."""
    values: dict[str, object] = {
        "interaction_id": f"i{number:04d}",
        "session_id": f"s{number:04d}",
        "prompt_token_ids": [1, 2, 3],
        "policy": "assistant",
        "sampling": Sampling(temperature=0.7),
        "renderer": RendererName(name="chatml", hash="00"),
        "tenant": "acme",
        "consent": "train",
        "served_at": START + timedelta(seconds=number),
        "choice_index": 0,
        "completion_token_ids": [10, 11],
        "logprobs": [-1.0, -1.5],
        "finish_reason": "stop",
        "topic": "onlinerl.interactions",
        "partition": 0,
        "offset": number,
        "ingested_at": START,
        "ingest_date": START.date(),
        "policy_version": 1,
    }
    values |= changes
    length = len(values["completion_token_ids"])  # type: ignore[arg-type]
    span = VersionSpan(version=f"assistant/{values['policy_version']}", start=0, end=length)
    return InteractionRow.model_validate({"version_spans": [span]} | values)


def feedback(of: InteractionRow, *, value: float, **changes: object) -> FeedbackRow:
    values: dict[str, object] = {
        "feedback_id": f"f-{of.interaction_id}-{of.choice_index}",
        "interaction_id": of.interaction_id,
        "choice_index": of.choice_index,
        "metric": "accepted",
        "value": value,
        "tenant": of.tenant,
        "given_at": of.served_at,
        "topic": "onlinerl.feedback",
        "partition": 0,
        "offset": of.offset,
        "ingested_at": of.served_at,
        "ingest_date": of.served_at.date(),
    }
    return FeedbackRow.model_validate(values | changes)


def promotion(version: int, *, action: str = "promote", minutes: int = 0) -> PromotionRow:
    return PromotionRow.model_validate(
        {
            "promotion_id": f"p-{version}-{action}-{minutes}",
            "policy": "assistant",
            "version": version,
            "action": action,
            "reason": "test",
            "actor": "controller",
            "decided_at": START + timedelta(minutes=minutes),
            "ingest_date": START.date(),
        }
    )


def make_store(
    root: Path,
    *,
    interactions: Sequence[InteractionRow] = (),
    feedback_rows: Sequence[FeedbackRow] = (),
    promotions: Sequence[PromotionRow] = (),
) -> DeltaStore:
    store = DeltaStore(str(root))
    store.create()
    tables = {"interactions": interactions, "feedback": feedback_rows, "promotions": promotions}
    for name, models in tables.items():
        if models:
            store.append(name, to_table(models))
    return store
