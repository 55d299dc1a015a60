"""The view `rewards`: from feedback to one number per completion.

Feedback joins only targets of its own tenant. What a retraction names no longer counts; the
retraction itself stays in force, whatever happens to it later. Within one metric, the values of one
source are aggregated as declared, then the sources are averaged by weight. Feedback on a completion
and feedback on its session are two levels: both are turned into numbers alone and added. Feedback
on a session counts on the turns that were served by the time it was given, discounted once per
such turn that followed. Feedback whose caller did not consent to training labels nothing. What has
no feedback has no row.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import get_args

from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from onlinerl.rollout_store.schema import FeedbackSource
from onlinerl.rollout_store.sql import literal, values_table

_LAST = "arg_max({0}, (given_at, feedback_id))"
_FIRST = "arg_min({0}, (given_at, feedback_id))"
_VALUES = {"last": _LAST, "first": _FIRST, "mean": "avg({0})", "sum": "sum({0})"}
_DISCOUNTS = {"last": _LAST, "first": _FIRST, "mean": "avg({0})", "sum": "avg({0})"}
"""As the values that they belong to; averaged for a sum, to which the offset is added once."""


def reward_view(rewards: RewardsConfig, *, as_of: datetime) -> str:
    """`CREATE VIEW` for `rewards`; what is not yet mature at `as_of` is left out."""
    return f"""
CREATE VIEW rewards AS
WITH {_specification(rewards)},
turns AS (
    SELECT interaction_id, choice_index, tenant, session_id, served_at,
        dense_rank() OVER (
            PARTITION BY tenant, session_id ORDER BY served_at, interaction_id
        ) AS turn
    FROM interactions
),
live AS (
    SELECT f.feedback_id, f.tenant, f.interaction_id, f.session_id, f.choice_index, f.metric,
        f."value", f.source, f.given_at
    FROM feedback AS f
    SEMI JOIN metrics AS m ON f.metric = m.metric
    WHERE f."value" IS NOT NULL AND isfinite(f."value")
        AND (f.consent IS NULL OR f.consent = 'train') AND NOT EXISTS (
        SELECT 1 FROM feedback AS r WHERE r.retracts = f.feedback_id AND r.tenant = f.tenant
    )
),
applied AS (
    SELECT t.interaction_id, t.choice_index, t.tenant, false AS of_session, 1.0::DOUBLE AS discount,
        f.* EXCLUDE (interaction_id, session_id, choice_index, tenant)
    FROM live AS f JOIN turns AS t ON t.interaction_id = f.interaction_id AND t.tenant = f.tenant
        AND (f.choice_index IS NULL OR f.choice_index = t.choice_index)
    UNION ALL
    SELECT t.interaction_id, t.choice_index, t.tenant, true,
        pow({literal(rewards.session_discount)},
            max(t.turn) OVER (PARTITION BY f.tenant, f.feedback_id) - t.turn),
        f.* EXCLUDE (interaction_id, session_id, choice_index, tenant)
    FROM live AS f JOIN turns AS t ON t.session_id = f.session_id AND t.tenant = f.tenant
        AND t.served_at <= f.given_at
),
by_source AS (
    SELECT a.interaction_id, a.choice_index, a.tenant, a.of_session, a.metric, w.source_weight,
        {_aggregate(rewards.metrics, '"value" * discount', by=_VALUES)} AS "value",
        {_aggregate(rewards.metrics, "discount", by=_DISCOUNTS)} AS discount,
        count(*) AS num_feedback, max(a.given_at) AS labelled_at
    FROM applied AS a JOIN sources AS w ON a.source = w.source
    WHERE w.source_weight > 0
    GROUP BY a.interaction_id, a.choice_index, a.tenant, a.of_session, a.metric, a.source,
        w.source_weight
),
by_metric AS (
    SELECT s.interaction_id, s.choice_index, s.tenant, s.of_session,
        m.weight * sum(s.source_weight * (m.scale * s."value" + m."offset" * s.discount))
            / sum(s.source_weight) AS signal,
        sum(s.num_feedback) AS num_feedback, max(s.labelled_at) AS labelled_at
    FROM by_source AS s JOIN metrics AS m ON s.metric = m.metric
    GROUP BY s.interaction_id, s.choice_index, s.tenant, s.of_session, s.metric,
        m.weight, m.scale, m."offset"
)
SELECT t.interaction_id, t.choice_index, t.session_id, t.tenant,
    least(greatest(sum(b.signal), {literal(rewards.clip[0])}), {literal(rewards.clip[1])})::DOUBLE
        AS reward,
    sum(b.num_feedback)::BIGINT AS num_feedback,
    max(b.labelled_at) AS labelled_at
FROM by_metric AS b JOIN turns AS t
    ON t.interaction_id = b.interaction_id AND t.choice_index = b.choice_index
    AND t.tenant = b.tenant
WHERE t.served_at <= {literal(as_of)} - to_microseconds({int(rewards.maturity_s * 1e6)})
GROUP BY t.interaction_id, t.choice_index, t.session_id, t.tenant
"""


def _specification(rewards: RewardsConfig) -> str:
    metrics = values_table(
        'metrics(metric, weight, scale, "offset")',
        [(m.name, m.weight, m.scale, m.offset) for m in rewards.metrics],
        empty=("", 0.0, 0.0, 0.0),
    )
    every_source: tuple[FeedbackSource, ...] = get_args(FeedbackSource)
    sources = values_table(
        "sources(source, source_weight)",
        [(source, rewards.sources.get(source, 1.0)) for source in every_source],
        empty=("", 0.0),
    )
    return f"{metrics},\n{sources}"


def _aggregate(metrics: Iterable[MetricConfig], number: str, *, by: Mapping[str, str]) -> str:
    """One expression that aggregates a number of each metric in its own way."""
    cases = " ".join(
        f"WHEN {literal(metric.name)} THEN {by[metric.aggregate].format(number)}"
        for metric in metrics
    )
    return f"CASE a.metric {cases} END" if cases else "NULL::DOUBLE"
