"""Reward to advantage, when almost every prompt was served once.

Where a group exists (several completions of one interaction, or one task tag over several
sessions of a tenant) the baseline of a row is the mean of the others (leave-one-out, Kool et al.
2019). Else it is an exponential mean of the tenant's rewards, per session and before the row's own
session enters it; for a tenant without a history it is the mean of its other sessions. So a row
never subtracts itself, and one sample per prompt has an advantage.

A row weighs 1 over the number of rows of its session, and every token of the row carries that
weight: sessions weigh the same per token, so one with longer completions counts for more.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onlinerl.trainer.rollouts.rows import RowKey, WindowRow

SMALLEST_SPREAD = 1e-6
"""Rewards or advantages that differ by less than this are the same: scaling them would be noise."""

SessionKey = tuple[str, str]
"""tenant and session_id."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """What every row of a window is worth, and the baselines that the next cycle starts from."""

    values: dict[RowKey, float]
    """Advantage, whitened when the rewards of the window differ."""
    weights: dict[RowKey, float]
    """The row's own weight over the number of rows of its session, for each token of the row."""
    baselines: dict[str, float]
    """Exponential mean reward by tenant, after this window."""


def compute_advantages(
    rows: Sequence[WindowRow], *, baselines: Mapping[str, float], decay: float
) -> Advantages:
    """Advantages of a window; `baselines` are those of the cycle before.

    When all rewards are equal, advantages are not whitened: they differ only because the baseline
    moves along the window, and a shift to mean 0 would blame half of the rows for that.
    """
    weights = session_weights(rows)
    tracked, after = tracked_baselines(rows, baselines=baselines, decay=decay)
    grouped = group_baselines(rows)
    raw = {row.key: row.reward - grouped.get(row.key, tracked[row.session]) for row in rows}
    rewards = [row.reward for row in rows]
    differ = max(rewards) - min(rewards) >= SMALLEST_SPREAD
    values = whiten(raw, weights=weights) if differ else raw
    return Advantages(values=values, weights=weights, baselines=after)


def session_weights(rows: Sequence[WindowRow]) -> dict[RowKey, float]:
    """Weights of rows with which every session sums to 1, or less where a user is capped."""
    sizes = Counter(row.session for row in rows)
    return {row.key: row.weight / sizes[row.session] for row in rows}


def group_baselines(rows: Sequence[WindowRow]) -> dict[RowKey, float]:
    """Leave-one-out means of the rows that have a group; the others are absent.

    Completions of one interaction come before the task tag. In a task group a row is compared
    with the other sessions only, one mean per session: its own later turns are no fair baseline.
    """
    found: dict[RowKey, float] = {}
    for group in _split(rows, by=_task_of_tenant).values():
        found |= _leave_one_out(group, unit=lambda row: row.session)
    for group in _split(rows, by=lambda row: row.interaction_id).values():
        found |= _leave_one_out(group, unit=lambda row: row.choice_index)
    return found


def tracked_baselines(
    rows: Sequence[WindowRow], *, baselines: Mapping[str, float], decay: float
) -> tuple[dict[SessionKey, float], dict[str, float]]:
    """The tenant's exponential mean before each session, and after the last one.

    A tenant without a history has for each session the mean over its others in the window, or 0
    when there is none; its exponential mean starts at the mean over all.
    """
    before: dict[SessionKey, float] = {}
    after = dict(baselines)
    for tenant, of_tenant in _split(rows, by=lambda row: row.tenant).items():
        means = _session_means(of_tenant)
        if tenant not in baselines:
            before |= {key: _mean_of_others(means, key=key) for key in means}
            after[tenant] = _mean(list(means.values()))
            continue
        for key, mean in means.items():
            before[key] = after[tenant]
            after[tenant] = decay * after[tenant] + (1 - decay) * mean
    return before, after


def whiten(
    values: Mapping[RowKey, float], *, weights: Mapping[RowKey, float]
) -> dict[RowKey, float]:
    """Shift to weighted mean 0 and scale to weighted deviation 1.

    Values without a spread stay as they are.
    """
    total = sum(weights[key] for key in values)
    mean = sum(weights[key] * value for key, value in values.items()) / total
    variance = sum(weights[key] * (value - mean) ** 2 for key, value in values.items()) / total
    if math.sqrt(variance) < SMALLEST_SPREAD:
        return dict(values)
    return {key: (value - mean) / math.sqrt(variance) for key, value in values.items()}


Key = TypeVar("Key", bound=Hashable)


def _task_of_tenant(row: WindowRow) -> tuple[str, str] | None:
    return None if row.task is None else (row.tenant, row.task)


def _leave_one_out(
    group: Sequence[WindowRow], *, unit: Callable[[WindowRow], Key]
) -> dict[RowKey, float]:
    means = {
        name: _mean([row.reward for row in of_unit])
        for name, of_unit in _split(group, by=unit).items()
    }
    if len(means) < 2:
        return {}
    return {row.key: _mean_of_others(means, key=unit(row)) for row in group}


def _mean_of_others(means: Mapping[Key, float], *, key: Key) -> float:
    return _mean([mean for other, mean in means.items() if other != key])


def _session_means(rows: Sequence[WindowRow]) -> dict[SessionKey, float]:
    """Mean reward of each session, in the order in which the sessions began."""
    in_time = sorted(rows, key=lambda row: (row.served_at, row.key))
    sessions = _split(in_time, by=lambda row: row.session)
    return {name: _mean([row.reward for row in of]) for name, of in sessions.items()}


def _split(
    rows: Sequence[WindowRow], *, by: Callable[[WindowRow], Key | None]
) -> dict[Key, list[WindowRow]]:
    groups: dict[Key, list[WindowRow]] = {}
    for row in rows:
        if (name := by(row)) is not None:
            groups.setdefault(name, []).append(row)
    return groups


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
