"""Four figures of a cycle for its reviewer, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.training.loop import History

GOOD, BAD, NEUTRAL, ACCENT = "#2a7f62", "#c1543b", "#8a8f98", "#2f5f9e"

CURVES = (
    ("loss/policy", "policy loss", "weighted sum over tokens"),
    ("kl_base", "KL to the base model", "nats per token"),
    ("ratio/k3", "k3 to the serving policy", "nats per token"),
    ("ratio/ess", "effective share of tokens", "ESS / n"),
    ("entropy", "entropy", "nats per token"),
    ("grad_norm", "gradient norm before clipping", "L2"),
)


def draw_all(folder: Path, *, plan: Plan, history: History, title: str) -> None:
    """Write `rewards.png`, `lengths.png`, `ratios.png` and `curves.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "rewards": draw_rewards(plan),
        "lengths": draw_lengths(plan),
        "ratios": draw_ratios(history),
        "curves": draw_curves(history, plan=plan),
    }
    for name, figure in figures.items():
        figure.suptitle(f"{title}: {figure.get_suptitle()}", fontsize=11)
        FigureCanvasAgg(figure).print_figure(folder / f"{name}.png", dpi=120)


def draw_rewards(plan: Plan) -> Figure:
    """The distribution of rewards, and their mean over time."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    rewards = np.array([row.reward for row in plan.rows])
    values, counts = np.unique(rewards.round(3), return_counts=True)
    if len(values) <= 8:
        colors = [GOOD if value > 0 else BAD if value < 0 else NEUTRAL for value in values]
        bars = left.bar([f"{value:g}" for value in values], counts, color=colors, width=0.6)
        left.bar_label(bars, [f"{count}\n{count / len(rewards):.0%}" for count in counts])
        left.margins(y=0.2)
    else:
        left.hist(rewards, bins=30, color=ACCENT)
        left.axvline(rewards.mean(), color=BAD, label=f"mean {rewards.mean():.3f}")
        left.legend(frameon=False)
    _label(left, "reward", "rows")
    _running_mean(right, rewards)
    figure.suptitle(f"rewards of {len(rewards)} rows, mean {rewards.mean():.3f}")
    return figure


def draw_lengths(plan: Plan) -> Figure:
    """Lengths of completions, separately for rewards above the mean and the others."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    lengths = np.array([row.num_sampled for row in plan.rows])
    rewards = np.array([row.reward for row in plan.rows])
    above = rewards > rewards.mean()
    bins = np.linspace(0, lengths.max() + 1, 31).tolist()
    for chosen, name, color in ((above, "above the mean", GOOD), (~above, "at or below it", BAD)):
        if chosen.any():
            label = f"reward {name}: {chosen.sum()} rows, median {np.median(lengths[chosen]):.0f}"
            axes.hist(
                lengths[chosen],
                bins=bins,
                histtype="stepfilled",
                facecolor=(color, 0.3),
                edgecolor=color,
                linewidth=1.5,
                label=label,
            )
    axes.legend(frameon=False)
    _label(axes, "completion tokens", "rows")
    figure.suptitle(f"completion lengths, median {np.median(lengths):.0f} tokens")
    return figure


def draw_ratios(history: History) -> Figure:
    """Log importance ratio of tokens before the first step and at the last measured one."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    samples = {"first step": history.first_log_ratio, "last step": history.last_log_ratio}
    # 99.9 % of both, so that one outlier does not flatten the rest.
    reach = max(1e-3, *(float(np.quantile(np.abs(s), 0.999)) for s in samples.values()))
    bins = np.linspace(-reach, reach, 81).tolist()
    for (name, sample), color in zip(samples.items(), (NEUTRAL, ACCENT), strict=True):
        label = (
            f"{name}: mean |log r| {np.abs(sample).mean():.4f}, largest {np.abs(sample).max():.2f}"
        )
        axes.hist(np.clip(sample, -reach, reach), bins=bins, color=color, alpha=0.6, label=label)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    _label(axes, "log r = log pi - log mu, nats (ends collect what is beyond)", "tokens")
    figure.suptitle("importance ratios")
    return figure


def draw_curves(history: History, *, plan: Plan) -> Figure:
    """Metrics over optimizer steps, with the bounds that stop a cycle."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    bounds = {"ratio/k3": plan.trainer.stop_k3, "ratio/ess": plan.trainer.stop_ess}
    for axes, (name, heading, unit) in zip(figure.subplots(2, 3).flat, CURVES, strict=True):
        _curve(axes, history.steps, name=name)
        if name in bounds:
            _bound(axes, bounds[name])
        axes.set_title(heading, fontsize=10)
        _label(axes, "optimizer step", unit)
    taken = sum("grad_norm" in step for step in history.steps)
    end = f"stopped: {history.stopped}" if history.stopped else "ran to its end"
    figure.suptitle(f"{taken} of {history.num_planned} steps, {end}")
    return figure


def _running_mean(axes: Axes, rewards: "np.typing.NDArray[np.float64]") -> None:
    size = max(1, len(rewards) // 10)
    means = np.convolve(rewards, np.ones(size) / size, mode="valid")
    axes.plot(np.arange(size, len(rewards) + 1), means, color=ACCENT)
    _label(axes, "rows, oldest first", f"mean reward of {size} rows")


def _curve(axes: Axes, steps: Sequence[Mapping[str, float]], *, name: str) -> None:
    points = [(number + 1, step[name]) for number, step in enumerate(steps) if name in step]
    axes.plot(*zip(*points, strict=True), color=ACCENT, marker="o", markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _bound(axes: Axes, bound: float) -> None:
    """A line where the cycle stops; a far bound is only named, so that the scale stays useful."""
    low, high = axes.get_ylim()
    label = f"stops at {bound:g}"
    if low - (high - low) * 4 <= bound <= high + (high - low) * 4:
        axes.axhline(bound, color=BAD, linestyle="--", label=label)
    else:
        axes.plot([], [], color=BAD, linestyle="--", label=f"{label}, far away")
    axes.legend(frameon=False, fontsize=8)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
