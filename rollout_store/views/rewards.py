"""The view `rewards`: from feedback to one number per completion.

- Feedback counts only on targets of its own tenant and within the attribution window.
- Retracted feedback does not count. A retraction stays in force even if it is retracted itself.
- Within one metric, the values of each source are aggregated as configured; then the sources are
  averaged by weight.
- Feedback on a completion and feedback on its session are turned into numbers separately and added.
- Feedback on a session counts on the turns that were served before it was given, discounted once
  per turn in between. The answer of a shadow is not a turn.
- A completion with neither feedback nor a configured default has no row.

Between its two joins the query carries only numbers; ids and names would make its rows ten times
larger.
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
from onlinerl.rollout_store.views.sql_files import read_sql

_LAST, _FIRST = "arg_max({0}, order_no)", "arg_min({0}, order_no)"
_MEAN = "sum({0} * influence) / sum(influence)"
_VALUES: dict[Aggregate, str] = {
    "last": _LAST,
    "first": _FIRST,
    "mean": _MEAN,
    "sum": "sum({0} * influence)",
}
"""How the values of one source are aggregated, weighted by the influence that the cap leaves."""

_DISCOUNTS = _VALUES | {"sum": _MEAN}
"""How the discounts of these values are aggregated: in the same way, but with the mean for a sum,
because the offset is added to a sum only once."""


def turns_view() -> str:
    """`CREATE VIEW` for the internal `reward_turns`: each completion's place in its session."""
    return read_sql("reward_turns")


def reward_view(rewards: RewardsConfig, *, as_of: datetime) -> str:
    """`CREATE VIEW` for `rewards`; leaves out what is not yet mature at `as_of`."""
    low, high = map(literal, rewards.clip)
    return read_sql(
        "rewards",
        rules=rules_table(rewards),
        in_time=in_time(rewards),
        session_discount=literal(rewards.session_discount),
        aggregated_value=_aggregated(rewards, "number * discount", _VALUES),
        aggregated_discount=_aggregated(rewards, "discount", _DISCOUNTS),
        defaults=_defaults(rewards),
        signals="all_signals" if _has_defaults(rewards) else "by_metric",
        low=low,
        high=high,
        listed_at=f"t.served_at + {interval(rewards.listed_after_s)}",
        as_of=literal(as_of),
    )


def _aggregated(rewards: RewardsConfig, number: str, by: dict[Aggregate, str]) -> str:
    """One expression that aggregates a number as the rule of its row says."""
    cases = " ".join(
        f"WHEN rule_no IN ({', '.join(map(str, rules))}) THEN {by[aggregate].format(number)}"
        for aggregate, rules in rules_by_aggregate(rewards).items()
    )
    return f"CASE {cases} END" if cases else "NULL::DOUBLE"


def _has_defaults(rewards: RewardsConfig) -> bool:
    return any(metric.default is not None for metric in rewards.metrics)


def _defaults(rewards: RewardsConfig) -> str:
    """The common table expressions for metrics with a default, each after a comma; or nothing."""
    if not _has_defaults(rewards):
        return ""
    return read_sql("reward_defaults", silent=defaults_table(rewards))
