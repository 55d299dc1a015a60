"""The view `suspicions`: feedback that one user or one source seems to have too large a hand in.

It only flags: what to do about it is a person's decision, `[rewards].user_cap` is the rule.
Feedback without a user is counted and never a user's.
"""

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.tables.sql import literal
from onlinerl.rollout_store.views.reward_rules import interval, window_number


def suspicions_view(rewards: RewardsConfig) -> str:
    """`CREATE VIEW` for `suspicions`: one row per tenant, kind, subject and window."""
    rule = rewards.suspicion
    window = f"to_timestamp({window_number(rewards)} * {literal(rule.window_s)})"
    burst = interval(rule.burst_s)
    return f"""
CREATE VIEW suspicions AS
WITH live AS (
    SELECT tenant, feedback_id, interaction_id, session_id, choice_index, metric, source, "user",
        "value", given_at, {window} AS window_start
    FROM feedback_signals WHERE unused_because IS NULL
),
totals AS (
    SELECT tenant, window_start, count(*) AS num_all FROM live GROUP BY tenant, window_start
),
shares AS (
    SELECT tenant, 'user_share' AS kind, "user" AS subject, window_start, count(*) AS num_feedback,
        {literal(rule.user_share)} AS bound
    FROM live WHERE "user" IS NOT NULL GROUP BY tenant, "user", window_start
    UNION ALL
    SELECT tenant, 'source_share', source, window_start, count(*), {literal(rule.source_share)}
    FROM live GROUP BY tenant, source, window_start
),
arrivals AS (
    SELECT *, count(*) OVER (
        PARTITION BY tenant, "user" ORDER BY given_at
        RANGE BETWEEN {burst} PRECEDING AND CURRENT ROW
    ) AS num_in_burst
    FROM live WHERE "user" IS NOT NULL
),
duplicates AS (
    SELECT tenant, "user", window_start, count(*) AS num_feedback
    FROM live WHERE "user" IS NOT NULL
    GROUP BY tenant, "user", window_start, interaction_id, session_id, choice_index, metric, source,
        "value"
    HAVING count(*) > 1
)
SELECT s.tenant, s.kind, s.subject, s.window_start, s.num_feedback,
    s.num_feedback / t.num_all AS share, s.bound
FROM shares AS s JOIN totals AS t USING (tenant, window_start)
WHERE t.num_all >= {rule.min_feedback} AND s.num_feedback / t.num_all > s.bound
UNION ALL
SELECT tenant, 'burst', "user", window_start, max(num_in_burst), NULL, {rule.burst_feedback}
FROM arrivals WHERE num_in_burst >= {rule.burst_feedback} GROUP BY tenant, "user", window_start
UNION ALL
SELECT tenant, 'duplicate', "user", window_start, sum(num_feedback)::BIGINT, NULL, 1
FROM duplicates GROUP BY tenant, "user", window_start
"""
