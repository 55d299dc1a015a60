"""The configuration of rewards as an SQL table: one rule per metric and source."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import get_args

from onlinerl.rollout_store.config import Aggregate, MetricConfig, RewardsConfig
from onlinerl.rollout_store.schema import FeedbackSource
from onlinerl.rollout_store.tables.sql import Value, literal, values_table

_COLUMNS = (
    'rules(rule_no, metric_no, metric, source, source_weight, weight, scale, "offset", is_bool, '
    "is_final, threshold, passes_at)"
)
_EMPTY = (0, 0, "", "", 0.0, 0.0, 0.0, 0.0, False, False, 0.0, 0.0)


def rules_table(rewards: RewardsConfig) -> str:
    """The common table expression `rules`; `rule_no` identifies a metric and a source."""
    rows = [_rule(rewards, *numbered) for numbered in _numbered(rewards)]
    return values_table(_COLUMNS, rows, empty=_EMPTY)


def rules_by_aggregate(rewards: RewardsConfig) -> dict[Aggregate, list[int]]:
    """The numbers of the rules by their aggregate."""
    rules: dict[Aggregate, list[int]] = {}
    for rule_no, _, metric, source in _numbered(rewards):
        rules.setdefault(metric.aggregate_of(source), []).append(rule_no)
    return rules


def defaults_table(rewards: RewardsConfig) -> str:
    """The common table expression `silent`: the default of each metric that has one, weighted."""
    rows = [
        (number, metric.weight * metric.default)
        for number, metric in enumerate(rewards.metrics)
        if metric.default is not None
    ]
    return values_table("silent(metric_no, signal)", rows, empty=(0, 0.0))


def in_time(rewards: RewardsConfig) -> str:
    """SQL: whether feedback `f` came within the attribution window of turn `t`."""
    if rewards.attribution_window_s is None:
        return "true"
    return f"f.given_at <= t.served_at + {interval(rewards.attribution_window_s)}"


def window_number(rewards: RewardsConfig) -> str:
    """SQL: the number of the window of `suspicion.window_s` that contains `given_at`."""
    return f"floor(epoch(given_at) / {literal(rewards.suspicion.window_s)})"


def window_start(rewards: RewardsConfig, at: datetime) -> datetime:
    """The start of the window, as `window_number` counts them, that contains this time."""
    window_s = rewards.suspicion.window_s
    return datetime.fromtimestamp(at.timestamp() // window_s * window_s, UTC)


def interval(seconds: float) -> str:
    """SQL: a duration."""
    return f"to_microseconds({int(seconds * 1e6)})"


def _numbered(
    rewards: RewardsConfig,
) -> Iterator[tuple[int, int, MetricConfig, FeedbackSource]]:
    sources: tuple[FeedbackSource, ...] = get_args(FeedbackSource)
    for metric_no, metric in enumerate(rewards.metrics):
        for number, source in enumerate(sources):
            yield metric_no * len(sources) + number, metric_no, metric, source


def _rule(
    rewards: RewardsConfig,
    rule_no: int,
    metric_no: int,
    metric: MetricConfig,
    source: FeedbackSource,
) -> tuple[Value, ...]:
    return (
        rule_no,
        metric_no,
        metric.name,
        source,
        rewards.source_weight(metric, source),
        metric.weight,
        metric.scale,
        metric.offset,
        metric.type == "bool",
        metric.final,
        metric.threshold,
        metric.passes_at,
    )
