"""Which feedback counts and why the rest does not: the views `feedback_use` and `demonstrations`.

The view `feedback_signals` is internal: it turns feedback into numbers, before feedback is joined
with its targets.
"""

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.tables.sql import literal
from onlinerl.rollout_store.views.reward_rules import in_time, rules_table, window_number
from onlinerl.rollout_store.views.sql_files import read_sql

OUTCOMES = {
    "counts": "It is part of a reward.",
    "retracted": "A later feedback retracted it.",
    "other_metric": "`[rewards]` does not name its metric.",
    "invalid_value": "Its value is not of the metric's type.",
    "ignored_source": "Its source has weight 0.",
    "no_consent": "It has no consent for training.",
    "no_target": "Its target is not in the tables, or was served later.",
    "too_late": "It came after the attribution window of all of its targets.",
    "retraction": "It only retracts another feedback.",
    "demonstration": "It only gives the answer that should have been given.",
}
"""The values of `feedback_use.outcome`."""


def signals_view(rewards: RewardsConfig) -> str:
    """`CREATE VIEW` for `feedback_signals`; rows with `unused_because` count nowhere."""
    return read_sql("feedback_signals", rules=rules_table(rewards), influence=_influence(rewards))


def feedback_use_view(rewards: RewardsConfig) -> str:
    """`CREATE VIEW` for `feedback_use`: every feedback, its outcome, and how late it came."""
    return read_sql("feedback_use", in_time=in_time(rewards))


def demonstrations_view() -> str:
    """`CREATE VIEW` for `demonstrations`."""
    return read_sql("demonstrations")


def _influence(rewards: RewardsConfig) -> str:
    """The share of each feedback that counts, so that no user exceeds the cap in a window."""
    if rewards.user_cap is None:
        return "SELECT *, 1.0::DOUBLE AS influence FROM checked"
    return read_sql(
        "feedback_influence", window=window_number(rewards), user_cap=literal(rewards.user_cap)
    )
