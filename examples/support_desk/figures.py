"""The demo's figure: accept rates by version, and traffic over time."""

from collections.abc import Sequence
from pathlib import Path

from examples.support_desk.report import VersionLine
from examples.support_desk.users import Answer

WINDOW = 40
"""Rated answers in the moving average."""

INK, MUTED, GOOD, BAD = "#1f2933", "#9aa5b1", "#2f6f9f", "#b4442f"


def draw(
    path: Path,
    *,
    lines: Sequence[VersionLine],
    answers: Sequence[Answer],
    swaps: Sequence[tuple[float, int]],
) -> None:
    """Draw the figure.

    Args:
        path: The PNG file to write.
        lines: The versions; each gets a bar with its confidence interval.
        answers: All answers in the order they came; unrated ones count as traffic only.
        swaps: Seconds since the first answer, and the version that serves from then on.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4), width_ratios=(1, 1.9), layout="constrained"
    )
    _bars(left, [line for line in lines if line.num_rated])
    _timeline(right, answers, swaps)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axes: "mpl.axes.Axes", lines: Sequence[VersionLine]) -> None:  # type: ignore[name-defined] # noqa: F821
    names = [f"v{line.version}" for line in lines]
    rates = [line.accept_rate for line in lines]
    errors = [
        [line.accept_rate - line.accept_low for line in lines],
        [line.accept_high - line.accept_rate for line in lines],
    ]
    axes.bar(names, rates, color=[MUTED, *[GOOD] * (len(lines) - 1)], width=0.65)
    axes.errorbar(names, rates, yerr=errors, fmt="none", ecolor=INK, capsize=4)
    for place, line in enumerate(lines):
        axes.text(place, line.accept_high + 0.02, f"{line.accept_rate:.0%}", ha="center", color=INK)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("answers that users accepted (95 % interval)")
    axes.set_title("Accept rate by policy version", loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _timeline(
    axes: "mpl.axes.Axes",  # type: ignore[name-defined] # noqa: F821
    answers: Sequence[Answer],
    swaps: Sequence[tuple[float, int]],
) -> None:
    rated = [answer for answer in answers if answer.rated]
    times = [rated[i].at_s for i in range(WINDOW - 1, len(rated))]
    moving = [
        sum(answer.accepted for answer in rated[i - WINDOW + 1 : i + 1]) / WINDOW
        for i in range(WINDOW - 1, len(rated))
    ]
    traffic = axes.twinx()
    end = max((answer.at_s for answer in answers), default=1.0)
    bins = max(1, int(end // 5))
    traffic.hist([answer.at_s for answer in answers], bins=bins, color=MUTED, alpha=0.35)
    traffic.set_ylabel("answers served per 5 s", color=MUTED)
    traffic.spines[["top"]].set_visible(False)
    axes.plot(times, moving, color=GOOD, linewidth=2)
    for at_s, version in swaps:
        axes.axvline(at_s, color=BAD, linewidth=1, linestyle="--")
        axes.text(at_s, 1.02, f" v{version}", color=BAD, ha="left", va="bottom")
    axes.set_zorder(traffic.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.set_ylim(0, 1.0)
    axes.set_xlabel("seconds of traffic; a dashed line is a weight swap")
    axes.set_ylabel(f"accept rate, moving over {WINDOW} ratings")
    axes.set_title("Traffic never stops while weights change", loc="left", pad=18)
    axes.spines[["top"]].set_visible(False)
