"""Limits a connection to a part of the tables, so that a small window is cheap to read.

A prompt may contain interactions that are older than the window, and siblings decide which turn
continues a segment. So a scope needs whole trees: every ancestor of its interactions, and every
descendant of these ancestors. The search reads only ids and never a token.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

import duckdb
import pyarrow as pa

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.tables.sql import literal
from onlinerl.rollout_store.views.reward_rules import window_start

_MARGIN = timedelta(days=1)
"""Rows are ingested after they are served, but the clocks of two machines may differ this much."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which interactions to read. All conditions must hold; an absent one always holds."""

    since: datetime | None = None
    """Served at or after this time."""
    until: datetime | None = None
    """Served before this time."""
    policy: str | None = None
    """Served by this policy."""
    interaction_ids: Collection[str] | None = None
    """One of these interactions."""

    def condition(self) -> str:
        """SQL over the columns of `interactions` and, for ids, the table `scope_named`."""
        conditions = ["true"]
        if self.since is not None:
            conditions.append(f"served_at >= {literal(self.since)}")
        if self.until is not None:
            conditions.append(f"served_at < {literal(self.until)}")
        if self.policy is not None:
            conditions.append(f"policy = {literal(self.policy)}")
        if self.interaction_ids is not None:
            conditions.append("interaction_id IN (FROM scope_named)")
        return " AND ".join(conditions)


@dataclass(frozen=True, kw_only=True)
class IngestedFrom:
    """The first day of each table that a scope needs; None if the scope is empty."""

    interactions: date | None
    feedback: date | None


def find_trees(
    connection: duckdb.DuckDBPyConnection, scope: Scope, *, rewards: RewardsConfig
) -> IngestedFrom:
    """Create the tables `scope_ids`, with the scope, and `scope_trees`, with all it needs.

    Args:
        connection: A connection with all of `interactions` registered as `stored_interactions`.
        scope: Which interactions to read.
        rewards: How feedback becomes a reward; a cap needs the feedback of whole windows.
    """
    if scope.interaction_ids is not None:
        ids = pa.array(sorted(scope.interaction_ids), pa.string())
        connection.register("scope_named", pa.table({"interaction_id": ids}))
    connection.execute(_seeds(scope))
    connection.execute(_TREES)
    ((first_ingested, first_served),) = connection.execute(_OLDEST).fetchall()
    if first_ingested is None:
        return IngestedFrom(interactions=None, feedback=None)
    served_from = min(scope.since or first_served, first_served).date() - _MARGIN
    # Rewards need the whole session from the first turn in scope on.
    return IngestedFrom(
        interactions=min(first_ingested, served_from),
        feedback=_feedback_from(served_from, rewards),
    )


def _feedback_from(served_from: date, rewards: RewardsConfig) -> date:
    """The first day of feedback: a cap on users needs the whole of the first window."""
    if rewards.user_cap is None:
        return served_from
    midnight = datetime.combine(served_from, time(), UTC)
    return window_start(rewards, midnight).date() - _MARGIN


def _seeds(scope: Scope) -> str:
    return f"""
CREATE TABLE scope_ids AS
SELECT interaction_id, tenant, min(served_at) AS served_at FROM stored_interactions
WHERE {scope.condition()} GROUP BY interaction_id, tenant
"""


_TREES = """
CREATE TABLE scope_trees AS
WITH RECURSIVE links AS MATERIALIZED (
    SELECT DISTINCT interaction_id, tenant, parent_id FROM stored_interactions
),
ancestors AS (
    SELECT interaction_id, tenant FROM scope_ids
    UNION
    SELECT l.parent_id, l.tenant FROM ancestors AS a JOIN links AS l USING (interaction_id, tenant)
    WHERE l.parent_id IS NOT NULL
),
trees AS (
    SELECT interaction_id, tenant FROM ancestors
    UNION
    SELECT l.interaction_id, l.tenant FROM trees AS t
    JOIN links AS l ON l.parent_id = t.interaction_id AND l.tenant = t.tenant
)
SELECT * FROM trees
"""

_OLDEST = """
SELECT (SELECT min(s.ingest_date) FROM stored_interactions AS s
        SEMI JOIN scope_trees AS t ON t.interaction_id = s.interaction_id AND t.tenant = s.tenant),
    (SELECT min(served_at) FROM scope_ids)
"""
