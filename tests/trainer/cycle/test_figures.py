"""Figures are drawn for windows and histories of every shape."""

from pathlib import Path

import numpy as np
import pytest

from onlinerl.trainer.cycle.figures import draw_all
from onlinerl.trainer.cycle.report import describe, how_it_ended, window_metrics
from onlinerl.trainer.rollouts.rows import WindowRow
from onlinerl.trainer.training.loop import History
from tests.trainer.builders import plan, row, rows_with

STEP = {
    "loss/policy": 0.1,
    "kl_base": 0.01,
    "ratio/k3": 0.001,
    "ratio/ess": 0.99,
    "entropy": 2.0,
    "masked_share": 0.0,
}


def history(num_steps: int = 3, **changes: object) -> History:
    taken = [STEP | {"grad_norm": 1.0} for _ in range(num_steps)]
    ratios = np.random.default_rng(0).normal(0, 0.01, 50)
    values: dict[str, object] = {
        "steps": taken,
        "num_planned": num_steps,
        "first_log_ratio": ratios,
        "last_log_ratio": 2 * ratios,
    }
    return History(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "seen"),
    [
        (rows_with([1.0, -1.0, 1.0]), history()),
        (rows_with([n / 20 for n in range(-20, 20)]), history()),
        ([row()], history(1)),
        (rows_with([0.5] * 5), history(1, first_log_ratio=np.zeros(3), last_log_ratio=np.zeros(3))),
        (rows_with([1.0, 0.0]), history(2, steps=[STEP | {"grad_norm": 1.0}, STEP], stopped="k3")),
    ],
    ids=["few values", "many values", "one row", "one reward", "stopped early"],
)
def test_four_figures_are_drawn(tmp_path: Path, rows: list[WindowRow], seen: History) -> None:
    draw_all(tmp_path / "figures", plan=plan(rows), history=seen, title="c1")

    sizes = {file.name: file.stat().st_size for file in (tmp_path / "figures").iterdir()}
    assert set(sizes) == {"rewards.png", "lengths.png", "ratios.png", "curves.png"}
    assert min(sizes.values()) > 5_000


def test_numbers_of_a_window() -> None:
    rows = [row(0, reward=1.0), row(1, reward=0.0, session_id="s0000", version=0, num_sampled=4)]
    found = window_metrics(plan(rows, excluded={"unlabelled": 3}))

    assert found == {
        "window/rows": 2,
        "window/sessions": 1,
        "window/reward_mean": 0.5,
        "window/reward_std": 0.5,
        "window/positive_share": 0.5,
        "window/length_mean": 3,
        "window/length_median": 3,
        "window/fresh_share": 0.5,
        "window/excluded_unlabelled": 3,
    }


def test_a_description_counts_only_steps_that_were_taken() -> None:
    stopped = history(2, steps=[STEP | {"grad_norm": 1.0}, STEP], stopped="k3 is too high")
    text = describe(
        plan(rows_with([1.0])), cycle_id="c1", steps=stopped.steps, end=how_it_ended(stopped)
    )

    assert "1 optimizer steps, stopped because k3 is too high." in text
    assert "| effective share of tokens | 0.9900 | 0.9900 |" in text
