"""Which feedback counts and why the rest does not: the views `feedback_use` and `demonstrations`.

`feedback_signals` is internal: feedback as numbers, before it meets what it is about.
"""

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.tables.sql import literal
from onlinerl.rollout_store.views.reward_rules import in_time, rules_table, window_number

OUTCOMES = {
    "counts": "It is part of a reward.",
    "retracted": "A later feedback took it back.",
    "other_metric": "`[rewards]` does not name its metric.",
    "invalid_value": "Its value is not of the metric's type.",
    "ignored_source": "Its source has weight 0.",
    "no_consent": "It may not be learned from.",
    "no_target": "What it is about is not in the tables, or was served later.",
    "too_late": "It came after the attribution window of everything it is about.",
    "retraction": "It only takes another one back.",
    "demonstration": "It only says what the answer should have been.",
}
"""What `feedback_use.outcome` may be."""


def signals_view(rewards: RewardsConfig) -> str:
    """`CREATE VIEW` for `feedback_signals`; what has `unused_because` counts nowhere."""
    return f"""
CREATE VIEW feedback_signals AS
WITH {rules_table(rewards)},
retracted AS (
    SELECT DISTINCT tenant, retracts AS feedback_id FROM feedback WHERE retracts IS NOT NULL
),
checked AS (
    SELECT f.feedback_id, f.tenant, f.interaction_id, f.session_id, f.choice_index, f.metric,
        f.source, f."user", f."value", f.given_at, r.rule_no,
        CASE WHEN r.threshold IS NULL THEN f."value"
            ELSE (f."value" >= r.passes_at)::INTEGER - r.threshold END AS number,
        CASE
            WHEN f."value" IS NULL AND f.demonstration IS NOT NULL THEN 'demonstration'
            WHEN f."value" IS NULL THEN 'retraction'
            WHEN r.metric IS NULL THEN 'other_metric'
            WHEN NOT isfinite(f."value") OR (r.is_bool AND f."value" NOT IN (0, 1))
                THEN 'invalid_value'
            WHEN x.feedback_id IS NOT NULL THEN 'retracted'
            WHEN f.consent <> 'train' THEN 'no_consent'
            WHEN r.source_weight = 0 THEN 'ignored_source'
        END AS unused_because
    FROM feedback AS f
    LEFT JOIN rules AS r ON r.metric = f.metric AND r.source = f.source
    LEFT JOIN retracted AS x ON x.feedback_id = f.feedback_id AND x.tenant = f.tenant
)
{_influence(rewards)}
"""


def feedback_use_view(rewards: RewardsConfig) -> str:
    """`CREATE VIEW` for `feedback_use`: every feedback, what became of it, and how late it came."""
    return f"""
CREATE VIEW feedback_use AS
WITH targets AS (
    SELECT f.tenant, f.feedback_id, f.given_at, t.served_at, {in_time(rewards)} AS in_time
    FROM feedback_signals AS f JOIN reward_turns AS t
        ON t.interaction_id = f.interaction_id AND t.tenant = f.tenant
        AND (f.choice_index IS NULL OR f.choice_index = t.choice_index)
    UNION ALL
    SELECT f.tenant, f.feedback_id, f.given_at, t.served_at, {in_time(rewards)}
    FROM feedback_signals AS f JOIN reward_turns AS t
        ON t.session_id = f.session_id AND t.tenant = f.tenant AND t.served_at <= f.given_at
        AND t.turn IS NOT NULL
),
reached AS (
    SELECT tenant, feedback_id, bool_or(in_time) AS in_time,
        (epoch_us(any_value(given_at)) - epoch_us(max(served_at))) / 1e6 AS delay_s
    FROM targets GROUP BY tenant, feedback_id
)
SELECT s.feedback_id, s.tenant, s.interaction_id, s.session_id, s.choice_index, s.metric, s.source,
    s."user", s."value", s.given_at,
    coalesce(s.unused_because, CASE WHEN r.in_time IS NULL THEN 'no_target'
        WHEN NOT r.in_time THEN 'too_late' ELSE 'counts' END) AS outcome,
    r.delay_s, s.influence
FROM feedback_signals AS s LEFT JOIN reached AS r USING (tenant, feedback_id)
"""


DEMONSTRATIONS_VIEW = """
CREATE VIEW demonstrations AS
WITH given AS (
    SELECT f.* FROM feedback AS f
    WHERE f.demonstration IS NOT NULL AND (f.consent IS NULL OR f.consent = 'train')
        AND NOT EXISTS (
            SELECT 1 FROM feedback AS r WHERE r.retracts = f.feedback_id AND r.tenant = f.tenant
        )
),
targets AS (
    SELECT f.feedback_id, f.tenant, f.interaction_id
    FROM given AS f WHERE f.interaction_id IS NOT NULL
    UNION ALL
    SELECT f.feedback_id, f.tenant, arg_max(i.interaction_id, (i.served_at, i.interaction_id))
    FROM given AS f JOIN reward_turns AS i
        ON i.session_id = f.session_id AND i.tenant = f.tenant AND i.served_at <= f.given_at
        AND i.turn IS NOT NULL
    GROUP BY f.feedback_id, f.tenant
)
SELECT f.feedback_id, t.interaction_id, p.session_id, f.tenant, f.metric, f.source, f.given_at,
    f.demonstration, p.full_prompt_token_ids, p.masked
FROM targets AS t JOIN given AS f USING (feedback_id, tenant)
JOIN prompts AS p ON p.interaction_id = t.interaction_id AND p.tenant = t.tenant
WHERE p.consented
"""


def _influence(rewards: RewardsConfig) -> str:
    """Share of each feedback that counts, so that no user has more than the cap of a window."""
    if rewards.user_cap is None:
        return "SELECT *, 1.0::DOUBLE AS influence FROM checked"
    window = window_number(rewards)
    # Counted apart and joined: windows over the rows themselves would sort all of them.
    return f"""
, of_users AS (
    SELECT tenant, "user", {window} AS bucket, count(*) AS num_own,
        sum(count(*)) OVER (PARTITION BY tenant, bucket) AS num_all
    FROM checked WHERE unused_because IS NULL GROUP BY tenant, "user", bucket
)
SELECT c.*, CASE WHEN u.num_own IS NULL THEN 1.0
    ELSE least(1.0, {literal(rewards.user_cap)} * u.num_all / u.num_own) END::DOUBLE AS influence
FROM checked AS c LEFT JOIN of_users AS u
    ON u.tenant = c.tenant AND u."user" = c."user" AND u.bucket = {window}
"""
