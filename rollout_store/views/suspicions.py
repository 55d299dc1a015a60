"""The view `suspicions`: feedback in which one user or one source has a suspiciously large share.

The view only flags. A person decides what to do about it; `[rewards].user_cap` limits the influence
of a user automatically. Feedback without a user counts in totals and is never attributed to a user.
"""

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.tables.sql import literal
from onlinerl.rollout_store.views.reward_rules import interval, window_number
from onlinerl.rollout_store.views.sql_files import read_sql


def suspicions_view(rewards: RewardsConfig) -> str:
    """`CREATE VIEW` for `suspicions`: one row per tenant, kind, subject and window."""
    rule = rewards.suspicion
    return read_sql(
        "suspicions",
        window=f"to_timestamp({window_number(rewards)} * {literal(rule.window_s)})",
        user_share=literal(rule.user_share),
        source_share=literal(rule.source_share),
        min_feedback=rule.min_feedback,
        burst_feedback=rule.burst_feedback,
        burst_interval=interval(rule.burst_s),
    )
