"""The view `rewards`: from feedback to one number per completion.

Feedback joins only targets of its own tenant, and only within the attribution window. What a
retraction names no longer counts; the retraction itself stays in force, whatever happens to it
later. Within one metric, the values of one source are aggregated as declared, then the sources are
averaged by weight. Feedback on a completion and feedback on its session are two levels: both are
turned into numbers alone and added. Feedback on a session counts on the turns that were served by
the time it was given, discounted once per such turn that followed. What has neither feedback nor a
declared default has no row.
"""

from datetime import datetime

from onlinerl.rollout_store.config import Aggregate, RewardsConfig
from onlinerl.rollout_store.sql import literal, values_table

TURNS_VIEW = """
CREATE VIEW reward_turns AS
SELECT interaction_id, choice_index, tenant, session_id, arm, served_at,
    dense_rank() OVER (PARTITION BY tenant, session_id ORDER BY served_at, interaction_id) AS turn
FROM interactions
"""
"""Internal: completions, without their tokens, and the place of each in its session."""

_AGGREGATES: dict[Aggregate, tuple[str, str]] = {
    "last": (
        "arg_max({0}, (given_at, feedback_id))",
        "arg_max({0}, (given_at, feedback_id))",
    ),
    "first": (
        "arg_min({0}, (given_at, feedback_id))",
        "arg_min({0}, (given_at, feedback_id))",
    ),
    "mean": ("sum({0} * influence) / sum(influence)", "sum({0} * influence) / sum(influence)"),
    "sum": ("sum({0} * influence)", "sum({0} * influence) / sum(influence)"),
}
"""How values become one, and how their discounts do: averaged for a sum, whose offset counts once.

Values weigh by the influence that their user has left, which is 1 without a cap.
"""


def reward_view(rewards: RewardsConfig, *, as_of: datetime) -> str:
    """`CREATE VIEW` for `rewards`; what is not yet mature at `as_of` is left out."""
    return f"""
CREATE VIEW rewards AS
WITH {_metrics(rewards)},
turns AS MATERIALIZED (FROM reward_turns),
signals AS MATERIALIZED (
    SELECT feedback_id, tenant, interaction_id, session_id, choice_index, metric, source, given_at,
        source_weight, aggregate, is_final, number, influence
    FROM feedback_signals WHERE unused_because IS NULL
),
moments AS (
    SELECT tenant, session_id, served_at, max(turn) AS turn FROM turns
    GROUP BY tenant, session_id, served_at
),
of_sessions AS (
    SELECT f.*, m.turn AS last_turn FROM signals AS f ASOF JOIN moments AS m
        ON m.session_id = f.session_id AND m.tenant = f.tenant AND m.served_at <= f.given_at
),
applied AS (
    SELECT t.interaction_id, t.choice_index, t.tenant, false AS of_session, 1.0::DOUBLE AS discount,
        f.* EXCLUDE (interaction_id, session_id, choice_index, tenant)
    FROM signals AS f JOIN turns AS t
        ON t.interaction_id = f.interaction_id AND t.tenant = f.tenant
        AND (f.choice_index IS NULL OR f.choice_index = t.choice_index)
    WHERE {in_time(rewards)}
    UNION ALL
    SELECT t.interaction_id, t.choice_index, t.tenant, true,
        pow({literal(rewards.session_discount)}, f.last_turn - t.turn),
        f.* EXCLUDE (interaction_id, session_id, choice_index, tenant, last_turn)
    FROM of_sessions AS f JOIN turns AS t
        ON t.session_id = f.session_id AND t.tenant = f.tenant AND t.turn <= f.last_turn
    WHERE {in_time(rewards)}
),
by_source AS (
    SELECT interaction_id, choice_index, tenant, of_session, metric, source_weight,
        {_aggregated(rewards, "number * discount", 0)} AS "value",
        {_aggregated(rewards, "discount", 1)} AS discount,
        count(*) AS num_feedback, sum(influence) AS influence, max(given_at) AS labelled_at,
        min(given_at) FILTER (is_final) AS final_at
    FROM applied
    GROUP BY interaction_id, choice_index, tenant, of_session, metric, source, source_weight,
        aggregate
),
by_metric AS (
    SELECT s.interaction_id, s.choice_index, s.tenant, s.of_session, s.metric,
        m.weight * sum(s.source_weight * (m.scale * s."value" + m."offset" * s.discount))
            / sum(s.source_weight) AS signal,
        sum(s.num_feedback) AS num_feedback, sum(s.influence) AS influence,
        max(s.labelled_at) AS labelled_at, min(s.final_at) AS final_at
    FROM by_source AS s JOIN metrics AS m ON s.metric = m.metric
    GROUP BY s.interaction_id, s.choice_index, s.tenant, s.of_session, s.metric,
        m.weight, m.scale, m."offset"
){_defaults(rewards)}
SELECT t.interaction_id, t.choice_index, t.session_id, t.tenant,
    least(greatest(sum(b.signal), {literal(rewards.clip[0])}), {literal(rewards.clip[1])})::DOUBLE
        AS reward,
    coalesce(sum(b.influence) / nullif(sum(b.num_feedback), 0), 1)::DOUBLE AS weight,
    sum(b.num_feedback)::BIGINT AS num_feedback,
    max(b.labelled_at) AS labelled_at,
    least(min(b.final_at), {_listed_at(rewards)}) AS matured_at
FROM {"all_signals" if _has_defaults(rewards) else "by_metric"} AS b JOIN turns AS t
    ON t.interaction_id = b.interaction_id AND t.choice_index = b.choice_index
    AND t.tenant = b.tenant
GROUP BY t.interaction_id, t.choice_index, t.session_id, t.tenant, t.served_at
HAVING min(b.final_at) IS NOT NULL OR {_listed_at(rewards)} <= {literal(as_of)}
"""


def in_time(rewards: RewardsConfig) -> str:
    """Whether feedback `f` came within the attribution window of turn `t`, as SQL."""
    if rewards.attribution_window_s is None:
        return "true"
    return f"f.given_at <= t.served_at + {_interval(rewards.attribution_window_s)}"


def _listed_at(rewards: RewardsConfig) -> str:
    return f"t.served_at + {_interval(rewards.listed_after_s)}"


def _interval(seconds: float) -> str:
    return f"to_microseconds({int(seconds * 1e6)})"


def _metrics(rewards: RewardsConfig) -> str:
    return values_table(
        'metrics(metric, weight, scale, "offset")',
        [(m.name, m.weight, m.scale, m.offset) for m in rewards.metrics],
        empty=("", 0.0, 0.0, 0.0),
    )


def _aggregated(rewards: RewardsConfig, number: str, which: int) -> str:
    """One expression that aggregates a number of each metric and source in its own way."""
    used = {m.aggregate for m in rewards.metrics}
    used |= {a for m in rewards.metrics for a in m.aggregates.values()}
    cases = " ".join(
        f"WHEN '{name}' THEN {_AGGREGATES[name][which].format(number)}" for name in sorted(used)
    )
    return f"CASE aggregate {cases} END" if cases else "NULL::DOUBLE"


def _has_defaults(rewards: RewardsConfig) -> bool:
    return any(metric.default is not None for metric in rewards.metrics)


def _defaults(rewards: RewardsConfig) -> str:
    """What counts where a metric has no feedback; nobody judges what a shadow answered."""
    if not _has_defaults(rewards):
        return ""
    silent = values_table(
        "silent(metric, signal)",
        [(m.name, m.weight * m.default) for m in rewards.metrics if m.default is not None],
        empty=("", 0.0),
    )
    return f""",
{silent},
all_signals AS (
    SELECT interaction_id, choice_index, tenant, signal, num_feedback, influence, labelled_at,
        final_at
    FROM by_metric
    UNION ALL
    SELECT t.interaction_id, t.choice_index, t.tenant, s.signal, 0, 0.0, NULL, NULL
    FROM turns AS t CROSS JOIN silent AS s
    ANTI JOIN by_metric AS b ON b.interaction_id = t.interaction_id AND b.tenant = t.tenant
        AND b.choice_index = t.choice_index AND b.metric = s.metric
    WHERE t.arm <> 'shadow'
)"""
