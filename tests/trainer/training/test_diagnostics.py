"""Watched numbers, worked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.trainer.training.diagnostics import effective_share, ratio_metrics, stop_reason


def test_numbers_of_two_tokens() -> None:
    # r = 2 and 1.
    metrics = ratio_metrics(np.log([2.0, 1.0]))

    assert metrics["ratio/k1"] == pytest.approx(-math.log(2) / 2)
    assert metrics["ratio/k3"] == pytest.approx((1 - math.log(2)) / 2)
    assert metrics["ratio/chi2"] == pytest.approx((4 + 1) / 2 - 1)
    assert metrics["ratio/ess"] == pytest.approx(9 / (2 * 5))
    assert metrics["ratio/mean_abs"] == pytest.approx(math.log(2) / 2)
    assert metrics["ratio/max_abs"] == pytest.approx(math.log(2))


def test_on_policy_nothing_is_far() -> None:
    metrics = ratio_metrics(np.zeros(5))

    assert metrics.pop("ratio/ess") == 1.0
    assert set(metrics.values()) == {0.0}


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30), st.floats(0.1, 10))
def test_effective_share_lies_between_one_token_and_all_and_ignores_scale(
    weights: list[float], scale: float
) -> None:
    share = effective_share(np.array(weights))

    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9
    assert effective_share(scale * np.array(weights)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("k3", "ess", "word"), [(0.04, 0.5, None), (0.06, 0.5, "k3"), (0.04, 0.2, "ESS")]
)
def test_a_cycle_stops_when_either_bound_is_passed(k3: float, ess: float, word: str | None) -> None:
    reason = stop_reason({"ratio/k3": k3, "ratio/ess": ess}, stop_k3=0.05, stop_ess=0.3)

    assert (reason is None) if word is None else (reason is not None and word in reason)
