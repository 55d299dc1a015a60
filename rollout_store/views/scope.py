"""What part of the tables a connection is about, so that a window costs what it holds.

A prompt may be built from interactions that are older than the window, and which turn continues a
segment depends on its siblings. So a scope keeps whole trees: every ancestor of what it names, and
every descendant of those. The search follows ids only and never reads a token.
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
"""A row is ingested after it was served, but by another machine's clock."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which interactions; everything when nothing is given."""

    since: datetime | None = None
    """Served at or after."""
    until: datetime | None = None
    """Served before."""
    policy: str | None = None
    """Served by."""
    interaction_ids: Collection[str] | None = None
    """These alone."""

    def condition(self) -> str:
        """The scope as SQL over the columns of `interactions` and the table `scope_named`."""
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
    """First days of the tables that a scope needs; None where it holds nothing at all."""

    interactions: date | None
    feedback: date | None


def find_trees(
    connection: duckdb.DuckDBPyConnection, scope: Scope, *, rewards: RewardsConfig
) -> IngestedFrom:
    """Create the tables `scope_ids`, what the scope names, and `scope_trees`, what it needs.

    `connection` has `stored_interactions` registered whole.
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
    # Rewards look at the whole of a session from the first turn in scope on.
    return IngestedFrom(
        interactions=min(first_ingested, served_from),
        feedback=_feedback_from(served_from, rewards),
    )


def _feedback_from(served_from: date, rewards: RewardsConfig) -> date:
    """The cap on a user counts whole windows, also one that began before anything in scope."""
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
