"""From rewards to advantages, when almost every prompt was served only once.

The baseline of a row that has a group (several completions of one interaction, or one task tag over
several sessions of a tenant) is the mean of the group's other rows (leave-one-out, Kool et al.
2019). The baseline of any other row is an exponential mean of the tenant's rewards over sessions,
before the row's own session; for a tenant without a history it is the mean of its other sessions.
So a row is never its own baseline, and a prompt that was served once has an advantage too.

A row's weight is 1 over the number of rows of its session, for each of its tokens: all sessions
have the same weight per token, so a session with longer completions counts for more.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onlinerl.trainer.rollouts.rows import RowKey, WindowRow

SMALLEST_SPREAD = 1e-6
"""Rewards or advantages that differ by less than this count as equal: scaling them adds noise."""

SessionKey = tuple[str, str]
"""tenant and session_id."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The advantage and weight of every row of a window, and the baselines of the next cycle."""

    values: dict[RowKey, float]
    """Advantage, whitened when the rewards of the window differ."""
    weights: dict[RowKey, float]
    """The row's own weight over the number of rows of its session, for each token of the row."""
    baselines: dict[str, float]
    """Exponential mean reward by tenant, after this window."""


def compute_advantages(
    rows: Sequence[WindowRow], *, baselines: Mapping[str, float], decay: float
) -> Advantages:
    """Advantages of the rows of a window.

    When all rewards are equal, advantages are not whitened: they differ only because the baseline
    moves along the window, and a shift to mean 0 would make half of them negative for that.

    Args:
        rows: The window; not empty.
        baselines: Exponential mean reward by tenant, after the cycle before.
        decay: Of the exponential mean, per session; from 0 to 1.
    """
    weights = session_weights(rows)
    tracked, after = track_baselines(rows, baselines=baselines, decay=decay)
    grouped = group_baselines(rows)
    raw = {row.key: row.reward - grouped.get(row.key, tracked[row.session]) for row in rows}
    rewards = [row.reward for row in rows]
    do_differ = max(rewards) - min(rewards) >= SMALLEST_SPREAD
    values = whiten(raw, weights=weights) if do_differ else raw
    return Advantages(values=values, weights=weights, baselines=after)


def session_weights(rows: Sequence[WindowRow]) -> dict[RowKey, float]:
    """Weights that sum to 1 over each session, or to less where a user's influence is capped."""
    sizes = Counter(row.session for row in rows)
    return {row.key: row.weight / sizes[row.session] for row in rows}


def group_baselines(rows: Sequence[WindowRow]) -> dict[RowKey, float]:
    """Leave-one-out means of the rows that have a group; rows without one are absent.

    A group of completions of one interaction replaces that of the task tag. In a task group a row
    is compared with the other sessions only, one mean per session: its own later turns are no fair
    baseline.
    """
    baselines: dict[RowKey, float] = {}
    for group in _split(rows, by=_task_of_tenant).values():
        baselines |= _leave_one_out(group, unit=lambda row: row.session)
    for group in _split(rows, by=lambda row: row.interaction_id).values():
        baselines |= _leave_one_out(group, unit=lambda row: row.choice_index)
    return baselines


def track_baselines(
    rows: Sequence[WindowRow], *, baselines: Mapping[str, float], decay: float
) -> tuple[dict[SessionKey, float], dict[str, float]]:
    """The exponential mean of its tenant before each session, and by tenant after the last one.

    A session of a tenant without a history gets the mean over the tenant's other sessions in the
    window, or 0 when there are none; the tenant's exponential mean starts at the mean over all.
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
    """Shift values to weighted mean 0 and scale them to weighted standard deviation 1.

    Values that are all equal are returned unchanged.
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
