"""The arithmetic of the demo."""

import math

import pytest

from examples.support_desk.questions import TOPICS, accepts
from examples.support_desk.report import targets, wilson

PASSWORD = next(topic for topic in TOPICS if topic.name == "password")
REACHED = {
    "accept_rate_first": 0.3,
    "accept_rate_last": 0.7,
    "accept_ci_first_hi": 0.38,
    "accept_ci_last_lo": 0.62,
    "num_rated_first": 160.0,
    "num_rated_last": 155.0,
    "perplexity_ratio": 1.02,
    "versions_promoted": 3.0,
    "versions_refused": 1.0,
    "requests_failed": 0.0,
    "served": 900.0,
    "rows": 900.0,
    "distinct_ids": 900.0,
    "mean_abs_logprob_diff_max": 0.006,
    "wall_s": 800.0,
    "rss_peak_gib": 8.0,
}


@pytest.mark.parametrize(
    ("answer", "finished", "accepted"),
    [
        ("Use the reset link on the login page.", True, True),
        ("Use the reset link on the login page.", False, False),
        ("We sell bicycles.", True, False),
        ("reset " * 31, True, False),
        ("", True, False),
    ],
    ids=["short and on topic", "cut off", "off topic", "too long", "empty"],
)
def test_users_accept_short_complete_answers_on_the_topic(
    answer: str, finished: bool, accepted: bool
) -> None:
    assert accepts(PASSWORD, answer, finished=finished) is accepted


def test_wilson_interval_of_15_in_50() -> None:
    # Worked by hand: centre (0.3 + 1.9208/50) / (1 + 3.8415/50) = 0.3143, half width 0.1239.
    assert wilson(15, 50) == pytest.approx((0.1910, 0.4375), abs=2e-4)


def test_an_interval_without_ratings_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_targets_are_all_reached_by_good_figures() -> None:
    assert all(target.is_reached for target in targets(REACHED))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("accept_rate_last", 0.59),
        ("accept_ci_last_lo", 0.38),
        ("num_rated_last", 149.0),
        ("perplexity_ratio", 1.21),
        ("perplexity_ratio", math.nan),
        ("versions_promoted", 2.0),
        ("versions_refused", 0.0),
        ("requests_failed", 1.0),
        ("rows", 899.0),
        ("distinct_ids", 899.0),
        ("mean_abs_logprob_diff_max", 0.01),
        ("wall_s", 901.0),
        ("rss_peak_gib", 12.0),
    ],
)
def test_a_figure_that_misses_its_target_misses_only_that_one(key: str, value: float) -> None:
    missed = [target for target in targets(REACHED | {key: value}) if not target.is_reached]

    assert len(missed) == 1
