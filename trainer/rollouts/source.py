"""The rollouts of a cycle, read from the rollout store at pinned table versions."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol, get_args

import pyarrow as pa
from typing_extensions import override

from onlinerl.errors import OnlineRLError
from onlinerl.rollout_store.config import RewardsConfig, StoreConfig
from onlinerl.rollout_store.holdout import is_heldout_sql
from onlinerl.rollout_store.policy_version import PolicyVersion
from onlinerl.rollout_store.snapshots import named as snapshots
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.trainability import request_fault_sql
from onlinerl.rollout_store.views.connection import connect
from onlinerl.rollout_store.views.scope import Scope
from onlinerl.trainer.rollouts.rows import RowKey, WindowRow
from onlinerl.trainer.rollouts.segment_reader import Layout, Piece, read_segments
from onlinerl.trainer.rollouts.segments import Segment, Span
from onlinerl.trainer.rollouts.window import Candidate, Exclusion, WindowQuery

logger = logging.getLogger(__name__)

TableVersions = Mapping[str, int]
"""Version of each table, by its name."""

_BATCH_ROWS = 1_000


class RolloutSource(Protocol):
    """Reads and holds the rollouts of a cycle.

    Every method may raise ServiceUnavailable. `at` is the table versions to read.
    """

    def versions(self) -> dict[str, int]:
        """The newest version of every table."""
        ...

    def served_versions(self, policy: str, *, at: TableVersions) -> list[int]:
        """Policy versions in the order in which they began to serve."""
        ...

    def candidates(
        self, query: WindowQuery, *, trained: Collection[RowKey], at: TableVersions
    ) -> list[Candidate]:
        """Every completion of the policy since `query.served_after`, with the reason against it.

        Args:
            query: What a completion must fulfil.
            trained: Completions that earlier cycles have learned from.
            at: Table versions to read.
        """
        ...

    def segments(self, keys: Sequence[RowKey], *, at: TableVersions) -> Iterator[Segment]:
        """The segments that hold these completions, in no particular order."""
        ...

    def hold(self, cycle_id: str, *, at: TableVersions) -> str | None:
        """Keep table versions readable while a cycle runs.

        Returns:
            Why they cannot be read any more; None when they are held.
        """
        ...

    def release(self, cycle_id: str) -> None:
        """End the hold of a cycle. Never raises: a hold ends by itself too."""
        ...


class DeltaSource(RolloutSource):
    """The RolloutSource over the Delta tables.

    Args:
        store: Where the tables lie.
        rewards: How feedback becomes a reward.
        hold_s: Seconds that the versions of a cycle stay readable when nobody releases them.
        pinned: Table versions that windows are chosen from; the newest when absent.
        now: The clock.
        limits: Memory and threads of a query.
    """

    def __init__(
        self,
        store: DeltaStore,
        *,
        rewards: RewardsConfig,
        hold_s: float = 86_400.0,
        pinned: TableVersions | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        limits: StoreConfig | None = None,
    ) -> None:
        self._store = store
        self._limits = limits
        self._rewards = rewards
        self._hold_s = hold_s
        self._pinned = pinned
        self._now = now

    @override
    def versions(self) -> dict[str, int]:
        return self._store.versions() if self._pinned is None else dict(self._pinned)

    @override
    def served_versions(self, policy: str, *, at: TableVersions) -> list[int]:
        batches = self._batches(_SERVED, {"policy": policy}, at=at, scope=None)
        return [version for batch in batches for version in batch["version"].to_pylist()]

    @override
    def candidates(
        self, query: WindowQuery, *, trained: Collection[RowKey], at: TableVersions
    ) -> list[Candidate]:
        held_out = is_heldout_sql("i.session_id", fraction=query.heldout_fraction)
        parameters = {
            "policy": query.policy,
            "versions": [
                str(PolicyVersion(query.policy, version)) for version in sorted(query.versions)
            ],
            "served_after": query.served_after,
            "max_row_tokens": query.max_row_tokens,
            "task_tag": query.task_tag,
        }
        sql = _CANDIDATES.format(held_out=held_out, request_fault=request_fault_sql("i"))
        scope = Scope(since=query.served_after, policy=query.policy)
        batches = self._batches(sql, parameters, at=at, scope=scope, keys=trained)
        return [_candidate(row) for batch in batches for row in batch.to_pylist()]

    @override
    def segments(self, keys: Sequence[RowKey], *, at: TableVersions) -> Iterator[Segment]:
        scope = Scope(interaction_ids={interaction_id for interaction_id, _ in keys})
        batches = self._batches(_LAYOUTS, {}, at=at, scope=scope, keys=keys)
        rows = [row for batch in batches for row in batch.to_pylist()]
        if not rows:
            return iter(())
        layouts = [_layout(row) for row in rows]
        return read_segments(self._store, layouts, since=rows[0]["since"], at=at)

    @override
    def hold(self, cycle_id: str, *, at: TableVersions) -> str | None:
        held = snapshots.hold(
            self._store, _hold_name(cycle_id), versions=at, at=self._now(), for_s=self._hold_s
        )
        return held.reason if held.action == "mark" else None

    @override
    def release(self, cycle_id: str) -> None:
        try:
            snapshots.release(self._store, _hold_name(cycle_id), at=self._now())
        except OnlineRLError as error:  # the snapshot lapses by itself
            logger.warning("could not release the table versions of the cycle: %s", error)

    def _batches(
        self,
        sql: str,
        parameters: dict[str, object],
        *,
        at: TableVersions,
        scope: Scope | None,
        keys: Collection[RowKey] = (),
    ) -> Iterator[pa.RecordBatch]:
        """The answer to a query, a batch at a time, so that only one batch is in memory."""
        connection = connect(
            self._store, rewards=self._rewards, versions=at, scope=scope, limits=self._limits
        )
        try:
            connection.register("given_rows", _key_table(keys))
            yield from connection.sql(sql, params=parameters).to_arrow_reader(_BATCH_ROWS)
        finally:
            connection.close()


_SERVED = """
SELECT version FROM promotions
WHERE policy = $policy AND action IN ('bootstrap', 'promote', 'rollback')
ORDER BY decided_at, promotion_id
"""

_CANDIDATES = """
SELECT i.interaction_id, i.choice_index, i.session_id, i.tenant, i.tags[$task_tag] AS task,
  r.reward, r.weight, i.policy_version AS version, i.sampling.temperature AS temperature,
  l.num_sampled, i.served_at,
  CASE
    WHEN i.consent <> 'train' THEN 'no_consent'
    WHEN NOT i.trainable OR l.num_sampled = 0 THEN 'untrainable'
    WHEN {held_out} THEN 'held_out'
    WHEN t.interaction_id IS NOT NULL THEN 'already_trained'
    WHEN r.reward IS NULL THEN 'unlabelled'
    WHEN NOT list_has_all($versions, list_transform(i.version_spans, lambda part: part.version))
      THEN 'stale_version'
    WHEN {request_fault} IS NOT NULL THEN {request_fault}
    WHEN l.prefix_length + l.num_new + l.num_tokens > $max_row_tokens THEN 'too_long'
    WHEN s.tenant IS NULL THEN 'broken_history'
  END AS exclusion
FROM interactions i
JOIN lengths l ON l.interaction_id = i.interaction_id AND l.choice_index = i.choice_index
  AND l.tenant = i.tenant
LEFT JOIN rewards r ON r.interaction_id = i.interaction_id AND r.choice_index = i.choice_index
  AND r.tenant = i.tenant
LEFT JOIN prompt_pieces s ON s.tenant = i.tenant AND s.interaction_id = i.interaction_id
  AND s.consented
LEFT JOIN given_rows t ON t.interaction_id = i.interaction_id AND t.choice_index = i.choice_index
WHERE i.policy = $policy AND i.served_at >= $served_after AND i.arm <> 'shadow'
"""
"""Every candidate with the first reason against it.

`trainable` holds the verdict of `rollout_store.trainability`, and `request_fault` repeats a part of
that rule for rows that an older ingest stored. The other reasons belong to the cycle: consent,
held-out sessions, rows learned before, labels, recent versions, length, history. `num_sampled` is 0
when scrubbing masked every token of a trainable row.
"""

_LAYOUTS = """
WITH found AS MATERIALIZED (SELECT segment_id, tenant, spans FROM segments)
SELECT f.segment_id, f.tenant, f.spans, p.pieces, first.at AS since
FROM found AS f
CROSS JOIN (
  SELECT min(least(served_at, ingest_date::TIMESTAMPTZ)) AS at FROM interactions
  WHERE interaction_id IN (SELECT interaction_id FROM lengths)
) AS first
JOIN prompt_pieces AS p ON p.tenant = f.tenant
  AND p.interaction_id = f.spans[-1].interaction_id
WHERE f.segment_id IN (
  SELECT spans_of.segment_id
  FROM (SELECT segment_id, unnest(spans) AS span FROM found) AS spans_of
  JOIN given_rows g ON g.interaction_id = spans_of.span.interaction_id
    AND g.choice_index = spans_of.span.choice_index
)
"""
"""Ids and lengths only: the query engine computes no column of `segments` that is not selected.

`since` is also the day of the first file, for clocks by which a row was served after its ingestion.
"""


def _hold_name(cycle_id: str) -> str:
    return f"cycle/{cycle_id}"


def _candidate(row: Mapping[str, Any]) -> Candidate:
    exclusion: Exclusion | None = row["exclusion"]
    if exclusion is not None:
        assert exclusion in get_args(Exclusion)
        return Candidate(row=None, exclusion=exclusion)
    return Candidate(row=WindowRow.model_validate(row), exclusion=None)


def _layout(row: Mapping[str, Any]) -> Layout:
    """A segment is the prompt of its last completion, and that completion."""
    spans = [Span(**span) for span in row["spans"]]
    last = spans[-1]
    completion = Piece(
        interaction_id=last.interaction_id,
        choice_index=last.choice_index,
        is_prompt=False,
        start=last.start,
        length=last.end - last.start,
    )
    return Layout(
        segment_id=row["segment_id"],
        tenant=row["tenant"],
        pieces=[*(Piece(**piece) for piece in row["pieces"]), completion],
        spans=spans,
    )


def _key_table(keys: Collection[RowKey]) -> pa.Table:
    return pa.table(
        {
            "interaction_id": pa.array([key[0] for key in keys], pa.string()),
            "choice_index": pa.array([key[1] for key in keys], pa.int64()),
        }
    )
