"""Reward to advantage, when almost every prompt was served once.

Where a group exists (several completions of one interaction, or one task tag over several
sessions) the baseline of a row is the mean of the others (leave-one-out, Kool et al. 2019). Else it
is an exponential mean of the tenant's rewards, per session and before the row's own session
enters it, so a row never subtracts itself and one sample per prompt has an advantage.
Every session weighs the same, however many rows it was cut into.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onlinerl.trainer.rows import RowKey, WindowRow

SMALLEST_SPREAD = 1e-6
"""Advantages that differ by less than this are left as they are: scaling would be noise."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """What every row of a window is worth, and the baselines that the next cycle starts from."""

    values: dict[RowKey, float]
    """Whitened advantage."""
    weights: dict[RowKey, float]
    """1 over the number of rows of the row's session."""
    baselines: dict[str, float]
    """Exponential mean reward by tenant, after this window."""


def compute_advantages(
    rows: Sequence[WindowRow], *, baselines: Mapping[str, float], decay: float
) -> Advantages:
    """Advantages of a window; `baselines` are those of the cycle before."""
    weights = session_weights(rows)
    tracked, after = tracked_baselines(rows, baselines=baselines, decay=decay)
    grouped = group_baselines(rows)
    raw = {row.key: row.reward - grouped.get(row.key, tracked[row.session_id]) for row in rows}
    return Advantages(values=whiten(raw, weights=weights), weights=weights, baselines=after)


def session_weights(rows: Sequence[WindowRow]) -> dict[RowKey, float]:
    """Weights with which every session sums to 1."""
    sizes: dict[str, int] = defaultdict(int)
    for row in rows:
        sizes[row.session_id] += 1
    return {row.key: 1 / sizes[row.session_id] for row in rows}


def group_baselines(rows: Sequence[WindowRow]) -> dict[RowKey, float]:
    """Leave-one-out means of the rows that have a group; the others are absent.

    Completions of one interaction come before the task tag. In a task group a row is compared
    with the other sessions only, one mean per session: its own later turns are no fair baseline.
    """
    found: dict[RowKey, float] = {}
    for group in _split(rows, by=lambda row: row.task).values():
        found |= _leave_one_out(group, unit=lambda row: row.session_id)
    for group in _split(rows, by=lambda row: row.interaction_id).values():
        found |= _leave_one_out(group, unit=lambda row: str(row.choice_index))
    return found


def tracked_baselines(
    rows: Sequence[WindowRow], *, baselines: Mapping[str, float], decay: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The tenant's exponential mean before each session, and after the last one.

    A tenant without a history starts from the mean over its other sessions in the window, or
    from 0 when there is none.
    """
    before: dict[str, float] = {}
    after = dict(baselines)
    for tenant, of_tenant in _split(rows, by=lambda row: row.tenant).items():
        means = _session_means(of_tenant)
        value = after.get(tenant)
        for position, (session_id, mean) in enumerate(means.items()):
            if value is None:
                value = _mean([other for i, other in enumerate(means.values()) if i != position])
            before[session_id] = value
            value = decay * value + (1 - decay) * mean
        if value is not None:
            after[tenant] = value
    return before, after


def whiten(
    values: Mapping[RowKey, float], *, weights: Mapping[RowKey, float]
) -> dict[RowKey, float]:
    """Shift to weighted mean 0 and scale to weighted deviation 1.

    A window of one reward only has no spread: its advantages stay as they are, since what the
    baselines say about them is all there is.
    """
    total = sum(weights[key] for key in values)
    mean = sum(weights[key] * value for key, value in values.items()) / total
    variance = sum(weights[key] * (value - mean) ** 2 for key, value in values.items()) / total
    if math.sqrt(variance) < SMALLEST_SPREAD:
        return dict(values)
    return {key: (value - mean) / math.sqrt(variance) for key, value in values.items()}


Label = Callable[[WindowRow], str | None]


def _leave_one_out(group: Sequence[WindowRow], *, unit: Label) -> dict[RowKey, float]:
    means = {
        name: _mean([row.reward for row in of_unit])
        for name, of_unit in _split(group, by=unit).items()
    }
    if len(means) < 2:
        return {}
    total, others = sum(means.values()), len(means) - 1
    return {row.key: (total - means[str(unit(row))]) / others for row in group}


def _session_means(rows: Sequence[WindowRow]) -> dict[str, float]:
    """Mean reward of each session, in the order in which the sessions began."""
    in_time = sorted(rows, key=lambda row: (row.served_at, row.key))
    sessions = _split(in_time, by=lambda row: row.session_id)
    return {name: _mean([row.reward for row in of]) for name, of in sessions.items()}


def _split(rows: Sequence[WindowRow], *, by: Label) -> dict[str, list[WindowRow]]:
    groups: dict[str, list[WindowRow]] = {}
    for row in rows:
        if (name := by(row)) is not None:
            groups.setdefault(name, []).append(row)
    return groups


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
