import math

import pytest

from onlinerl.deploy.config import DriftGateConfig, PerplexityGateConfig, RewardGateConfig
from onlinerl.deploy.gates.verdicts import (
    ScoredAnswer,
    drift_gate,
    estimate_reward,
    finite_gate,
    none_failed,
    perplexity_gate,
    report,
    reward_gate,
)


def answer(reward: float | None, *, weight: float = 1.0, champion: float = 1.0) -> ScoredAnswer:
    """An answer whose candidate and champion weights against the behaviour are as given."""
    return ScoredAnswer(
        behaviour=-5.0,
        champion=-5.0 + math.log(champion),
        candidate=-5.0 + math.log(weight),
        reward=reward,
    )


def test_one_weight_that_is_not_finite_fails() -> None:
    assert finite_gate(num_nonfinite=0).status == "passed"
    assert finite_gate(num_nonfinite=1).status == "failed"


@pytest.mark.parametrize(
    ("k3", "num_tokens", "status"),
    [
        (0.1, 200, "passed"),
        (0.1001, 200, "failed"),
        (0.0, 199, "skipped"),
        (None, 0, "skipped"),
        (math.nan, 500, "failed"),
    ],
)
def test_drift_is_bounded_when_there_is_evidence(
    k3: float | None, num_tokens: int, status: str
) -> None:
    config = DriftGateConfig(max_k3=0.1, min_tokens=200)

    assert drift_gate(k3=k3, num_tokens=num_tokens, config=config).status == status


@pytest.mark.parametrize(
    ("candidate", "status"), [(12.0, "passed"), (12.1, "failed"), (math.nan, "failed")]
)
def test_perplexity_is_bounded_by_a_ratio(candidate: float, status: str) -> None:
    config = PerplexityGateConfig(max_ratio=1.2)

    assert perplexity_gate(candidate=candidate, base=10.0, config=config).status == status


def test_reward_difference_by_hand() -> None:
    # Mean reward 0.5. Terms: (2 - 1) * 0.5 and (0.5 - 1) * -0.5, mean 0.375.
    estimate = estimate_reward(
        [answer(1.0, weight=2.0), answer(0.0, weight=0.5)], max_weight=10, confidence=0.95
    )

    assert estimate is not None
    assert estimate.difference == pytest.approx(0.375)
    # Half a width: 1.96 * sqrt(var / 2), var of (0.5, 0.25) = 0.03125.
    assert estimate.high - estimate.difference == pytest.approx(1.95996 * 0.125, rel=1e-4)
    assert estimate.ess == pytest.approx(2.5**2 / 4.25)
    assert estimate.snips == pytest.approx(2.0 / 2.5)


def test_the_champion_does_not_differ_from_itself() -> None:
    answers = [answer(reward, weight=0.7, champion=0.7) for reward in (0.0, 1.0, 1.0)]
    estimate = estimate_reward(answers, max_weight=10, confidence=0.95)

    assert estimate is not None
    assert (estimate.difference, estimate.low, estimate.high) == (0.0, 0.0, 0.0)


def test_a_huge_weight_is_clipped() -> None:
    estimate = estimate_reward(
        [answer(1.0, weight=1e9), answer(0.0)], max_weight=3.0, confidence=0.95
    )

    assert estimate is not None
    assert estimate.difference == pytest.approx((2.0 * 0.5 + 0.0) / 2)


def config(**changes: float) -> RewardGateConfig:
    return RewardGateConfig.model_validate({"min_ess": 10, "margin": 0.05} | changes)


def test_reward_fails_only_when_the_logs_rule_the_candidate_out() -> None:
    worse = [answer(1.0, weight=0.2)] * 50 + [answer(0.0, weight=1.8)] * 50
    better = [answer(1.0, weight=1.8)] * 50 + [answer(0.0, weight=0.2)] * 50
    unsure = [answer(1.0, weight=0.2), answer(0.0, weight=1.8)] * 6 + [
        answer(1.0, weight=1.9),
        answer(0.0, weight=0.1),
    ] * 5

    assert reward_gate(worse, config()).status == "failed"
    assert reward_gate(better, config()).status == "passed"
    assert reward_gate(unsure, config()).status == "passed"


def test_few_effective_answers_are_no_evidence() -> None:
    assert reward_gate([answer(1.0)] * 5, config()).status == "skipped"
    assert reward_gate([answer(None)] * 500, config()).status == "skipped"
    assert reward_gate([], config()).status == "skipped"
    lopsided = [answer(1.0, weight=10.0)] * 12 + [answer(0.0, weight=0.01)] * 400
    assert reward_gate(lopsided, config()).status == "skipped"


def test_no_feedback_is_not_a_reward_of_zero() -> None:
    rated = [answer(1.0, weight=1.1), answer(0.0, weight=0.9)] * 20

    with_silent = reward_gate(rated + [answer(None, weight=0.1)] * 100, config())

    assert with_silent == reward_gate(rated, config())


def test_skipped_does_not_stop_a_candidate_but_failed_does() -> None:
    skipped = drift_gate(k3=None, num_tokens=0, config=DriftGateConfig())

    assert none_failed([finite_gate(num_nonfinite=0), skipped])
    assert not none_failed([finite_gate(num_nonfinite=1), skipped])


def test_a_disabled_gate_is_recorded_as_skipped() -> None:
    assert reward_gate([answer(1.0)] * 100, RewardGateConfig(enabled=False)).status == "skipped"
    off = DriftGateConfig(enabled=False)
    assert drift_gate(k3=9.0, num_tokens=999, config=off).status == "skipped"
    no_perplexity = PerplexityGateConfig(enabled=False)
    assert perplexity_gate(candidate=9, base=1, config=no_perplexity).status == "skipped"


def test_the_report_is_a_markdown_table() -> None:
    text = report([finite_gate(num_nonfinite=0)], headline="All gates let it pass.")

    assert text.splitlines()[2:4] == [
        "| gate | verdict | value | bound | detail |",
        "|---|---|---|---|---|",
    ]
    assert "| finite | passed | 0 | 0 |" in text
