"""Where a cycle reads rollouts: the views of the rollout store, at pinned table versions."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, get_args

import pyarrow as pa

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.holdout import is_heldout_sql
from onlinerl.rollout_store.store import DeltaStore
from onlinerl.rollout_store.views import connect
from onlinerl.trainer.rows import RowKey, WindowRow
from onlinerl.trainer.segments import Segment
from onlinerl.trainer.window import Candidate, Exclusion, WindowQuery

TableVersions = Mapping[str, int]


class RolloutSource(Protocol):
    """Reads of one cycle; all but the first name the table versions they are made at."""

    def versions(self) -> dict[str, int]:
        """The newest version of every table."""
        ...

    def served_versions(self, policy: str, *, at: TableVersions) -> list[int]:
        """Policy versions in the order in which they began to serve."""
        ...

    def candidates(
        self, query: WindowQuery, *, trained: Collection[RowKey], at: TableVersions
    ) -> list[Candidate]:
        """Every completion of the policy since `query.served_after`."""
        ...

    def segments(self, keys: Sequence[RowKey], *, at: TableVersions) -> list[Segment]:
        """The segments that hold these completions."""
        ...


class DeltaSource:
    """The RolloutSource over the Delta tables."""

    def __init__(self, store: DeltaStore, *, rewards: RewardsConfig) -> None:
        self._store = store
        self._rewards = rewards

    def versions(self) -> dict[str, int]:
        """As the store says."""
        return self._store.versions()

    def served_versions(self, policy: str, *, at: TableVersions) -> list[int]:
        """From the table `promotions`."""
        rows = self._query(_SERVED, {"policy": policy}, at=at)
        return [int(row["version"]) for row in rows]

    def candidates(
        self, query: WindowQuery, *, trained: Collection[RowKey], at: TableVersions
    ) -> list[Candidate]:
        """One query that names the first reason against each completion."""
        held_out = is_heldout_sql("i.session_id", fraction=query.heldout_fraction)
        parameters = {
            "policy": query.policy,
            "versions": [f"{query.policy}/{version}" for version in sorted(query.versions)],
            "served_after": query.served_after,
            "max_row_tokens": query.max_row_tokens,
            "task_tag": query.task_tag,
        }
        sql = _CANDIDATES.format(held_out=held_out)
        rows = self._query(sql, parameters, at=at, keys=trained)
        return [_candidate(row) for row in rows]

    def segments(self, keys: Sequence[RowKey], *, at: TableVersions) -> list[Segment]:
        """From the view `segments`."""
        rows = self._query(_SEGMENTS, {}, at=at, keys=keys)
        return [Segment.model_validate(row) for row in rows]

    def _query(
        self,
        sql: str,
        parameters: dict[str, object],
        *,
        at: TableVersions,
        keys: Collection[RowKey] = (),
    ) -> list[dict[str, Any]]:
        connection = connect(self._store, rewards=self._rewards, versions=at)
        try:
            connection.register("given_rows", _key_table(keys))
            result: pa.Table = connection.sql(sql, params=parameters).to_arrow_table()
            rows: list[dict[str, Any]] = result.to_pylist()
            return rows
        finally:
            connection.close()


_SERVED = """
SELECT version FROM promotions
WHERE policy = $policy AND action IN ('bootstrap', 'promote', 'rollback')
ORDER BY decided_at, promotion_id
"""

_CANDIDATES = """
SELECT i.interaction_id, i.choice_index, i.session_id, i.tenant, i.tags[$task_tag] AS task,
  r.reward, i.policy_version AS version, i.sampling.temperature AS temperature,
  len(i.completion_token_ids) AS num_sampled, i.served_at,
  CASE
    WHEN i.consent <> 'train' THEN 'no_consent'
    WHEN NOT i.trainable OR len(i.completion_token_ids) = 0 THEN 'untrainable'
    WHEN {held_out} THEN 'held_out'
    WHEN t.interaction_id IS NOT NULL THEN 'already_trained'
    WHEN r.reward IS NULL THEN 'unlabelled'
    WHEN NOT list_has_all($versions, list_transform(i.version_spans, lambda part: part.version))
      THEN 'stale_version'
    WHEN i.sampling.temperature <= 0 THEN 'greedy'
    WHEN i.logprob_mode <> 'processed' THEN 'raw_logprobs'
    WHEN i.sampling.top_p < 1 OR i.sampling.top_k > 0 THEN 'truncated_sampling'
    WHEN i.prefix_length + len(i.prompt_token_ids) + len(i.completion_token_ids)
      > $max_row_tokens THEN 'too_long'
    WHEN s.tenant IS NULL THEN 'broken_history'
  END AS exclusion
FROM interactions i
LEFT JOIN rewards r ON r.interaction_id = i.interaction_id AND r.choice_index = i.choice_index
  AND r.tenant = i.tenant
LEFT JOIN prompt_pieces s ON s.tenant = i.tenant AND s.interaction_id = i.interaction_id
  AND s.consented
LEFT JOIN given_rows t ON t.interaction_id = i.interaction_id AND t.choice_index = i.choice_index
WHERE i.policy = $policy AND i.served_at >= $served_after AND i.arm <> 'shadow'
"""

_SEGMENTS = """
SELECT s.segment_id, s.token_ids, s.logprobs, s.spans
FROM segments s
WHERE s.segment_id IN (
  SELECT spans_of.segment_id
  FROM (SELECT segment_id, unnest(spans) AS span FROM segments) AS spans_of
  JOIN given_rows g ON g.interaction_id = spans_of.span.interaction_id
    AND g.choice_index = spans_of.span.choice_index
)
"""


def _candidate(row: Mapping[str, Any]) -> Candidate:
    exclusion: Exclusion | None = row["exclusion"]
    if exclusion is not None:
        assert exclusion in get_args(Exclusion)
        return Candidate(row=None, exclusion=exclusion)
    return Candidate(row=WindowRow.model_validate(row), exclusion=None)


def _key_table(keys: Collection[RowKey]) -> pa.Table:
    return pa.table(
        {
            "interaction_id": pa.array([key[0] for key in keys], pa.string()),
            "choice_index": pa.array([key[1] for key in keys], pa.int64()),
        }
    )
