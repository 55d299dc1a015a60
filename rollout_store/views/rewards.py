"""The view `rewards`: from feedback to one number per completion.

Feedback joins only targets of its own tenant, and only within the attribution window. What a
retraction names no longer counts; the retraction itself stays in force, whatever happens to it
later. Within one metric, the values of one source are aggregated as declared, then the sources are
averaged by weight. Feedback on a completion and feedback on its session are two levels: both are
turned into numbers alone and added. Feedback on a session counts on the turns that were served by
the time it was given, discounted once per such turn that followed; what a shadow answered is no
turn. What has neither feedback nor a declared default has no row.

Between the two joins a row is numbers only: ids and names would make it ten times as large.
"""

from datetime import datetime

from onlinerl.rollout_store.config import Aggregate, RewardsConfig
from onlinerl.rollout_store.tables.sql import literal
from onlinerl.rollout_store.views.reward_rules import (
    defaults_table,
    in_time,
    interval,
    rules_by_aggregate,
    rules_table,
)

TURNS_VIEW = """
CREATE VIEW reward_turns AS
SELECT interaction_id, choice_index, tenant, session_id, served_at,
    CASE WHEN arm <> 'shadow' THEN dense_rank() OVER (
        PARTITION BY tenant, session_id, arm = 'shadow' ORDER BY served_at, interaction_id
    ) END AS turn
FROM interactions
"""
"""Internal: completions, without their tokens, and the place of each in its session.

What a shadow answered has no turn: nobody was shown it, so whoever judges the session does not
judge it, while a judge of its own may.
"""

_LAST, _FIRST = "arg_max({0}, order_no)", "arg_min({0}, order_no)"
_MEAN = "sum({0} * influence) / sum(influence)"
_VALUES: dict[Aggregate, str] = {
    "last": _LAST,
    "first": _FIRST,
    "mean": _MEAN,
    "sum": "sum({0} * influence)",
}
"""How values become one; they weigh by what the cap leaves of their user's influence."""

_DISCOUNTS = _VALUES | {"sum": _MEAN}
"""As the values that they belong to; averaged for a sum, to which the offset is added once."""


def reward_view(rewards: RewardsConfig, *, as_of: datetime) -> str:
    """`CREATE VIEW` for `rewards`; what is not yet mature at `as_of` is left out."""
    low, high = map(literal, rewards.clip)
    return f"""
CREATE VIEW rewards AS
WITH {rules_table(rewards)},
turns AS MATERIALIZED (SELECT row_number() OVER () AS turn_no, * FROM reward_turns),
signals AS MATERIALIZED (
    SELECT tenant, interaction_id, session_id, choice_index, rule_no, number, influence, given_at,
        row_number() OVER (ORDER BY given_at, feedback_id) AS order_no
    FROM feedback_signals WHERE unused_because IS NULL
),
moments AS (
    SELECT tenant, session_id, served_at, max(turn) AS turn FROM turns WHERE turn IS NOT NULL
    GROUP BY tenant, session_id, served_at
),
of_sessions AS (
    SELECT f.*, m.turn AS last_turn FROM signals AS f ASOF JOIN moments AS m
        ON m.session_id = f.session_id AND m.tenant = f.tenant AND m.served_at <= f.given_at
),
applied AS (
    SELECT t.turn_no, false AS of_session, 1.0::DOUBLE AS discount,
        f.rule_no, f.number, f.influence, f.given_at, f.order_no
    FROM signals AS f JOIN turns AS t
        ON t.interaction_id = f.interaction_id AND t.tenant = f.tenant
        AND (f.choice_index IS NULL OR f.choice_index = t.choice_index)
    WHERE {in_time(rewards)}
    UNION ALL
    SELECT t.turn_no, true, pow({literal(rewards.session_discount)}, f.last_turn - t.turn),
        f.rule_no, f.number, f.influence, f.given_at, f.order_no
    FROM of_sessions AS f JOIN turns AS t
        ON t.session_id = f.session_id AND t.tenant = f.tenant AND t.turn <= f.last_turn
    WHERE {in_time(rewards)}
),
by_source AS (
    SELECT turn_no, of_session, rule_no,
        {_aggregated(rewards, "number * discount", _VALUES)} AS "value",
        {_aggregated(rewards, "discount", _DISCOUNTS)} AS discount,
        count(*) AS num_feedback, sum(influence) AS influence, max(given_at) AS labelled_at,
        min(given_at) AS first_at
    FROM applied GROUP BY turn_no, of_session, rule_no
),
by_metric AS (
    SELECT s.turn_no, r.metric_no,
        any_value(r.weight)
            * sum(r.source_weight * (r.scale * s."value" + r."offset" * s.discount))
            / sum(r.source_weight) AS signal,
        sum(s.num_feedback) AS num_feedback, sum(s.influence) AS influence,
        max(s.labelled_at) AS labelled_at, min(s.first_at) FILTER (r.is_final) AS final_at
    FROM by_source AS s JOIN rules AS r USING (rule_no)
    GROUP BY s.turn_no, s.of_session, r.metric_no
){_defaults(rewards)},
by_turn AS (
    SELECT turn_no, sum(signal) AS signal, sum(num_feedback)::BIGINT AS num_feedback,
        sum(influence) AS influence, max(labelled_at) AS labelled_at, min(final_at) AS final_at
    FROM {"all_signals" if _has_defaults(rewards) else "by_metric"} GROUP BY turn_no
)
SELECT t.interaction_id, t.choice_index, t.session_id, t.tenant,
    least(greatest(b.signal, {low}), {high})::DOUBLE AS reward,
    coalesce(b.influence / nullif(b.num_feedback, 0), 1)::DOUBLE AS weight,
    b.num_feedback, b.labelled_at, least(b.final_at, {_listed_at(rewards)}) AS matured_at
FROM by_turn AS b JOIN turns AS t USING (turn_no)
WHERE b.final_at IS NOT NULL OR {_listed_at(rewards)} <= {literal(as_of)}
"""


def _listed_at(rewards: RewardsConfig) -> str:
    return f"t.served_at + {interval(rewards.listed_after_s)}"


def _aggregated(rewards: RewardsConfig, number: str, by: dict[Aggregate, str]) -> str:
    """One expression that aggregates a number of each rule in its own way."""
    cases = " ".join(
        f"WHEN rule_no IN ({', '.join(map(str, rules))}) THEN {by[aggregate].format(number)}"
        for aggregate, rules in rules_by_aggregate(rewards).items()
    )
    return f"CASE {cases} END" if cases else "NULL::DOUBLE"


def _has_defaults(rewards: RewardsConfig) -> bool:
    return any(metric.default is not None for metric in rewards.metrics)


def _defaults(rewards: RewardsConfig) -> str:
    """Silence where it is declared to say something; nobody judges what a shadow answered."""
    if not _has_defaults(rewards):
        return ""
    return f""",
{defaults_table(rewards)},
all_signals AS (
    SELECT turn_no, signal, num_feedback, influence, labelled_at, final_at FROM by_metric
    UNION ALL
    SELECT t.turn_no, s.signal, 0, 0.0, NULL, NULL
    FROM turns AS t CROSS JOIN silent AS s
    ANTI JOIN by_metric AS b ON b.turn_no = t.turn_no AND b.metric_no = s.metric_no
    WHERE t.turn IS NOT NULL
)"""
