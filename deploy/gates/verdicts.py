"""Verdicts of the gates: pure functions of measured values.

A gate is passed, failed or skipped. `skipped` means too little evidence, or that the gate is
disabled. It neither blocks nor supports a candidate, but if drift was skipped for lack of evidence,
a person must approve the candidate. A measurement that is not a number fails the gate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from onlinerl.deploy.config import (
    DriftGateConfig,
    GatesConfig,
    PerplexityGateConfig,
    RewardGateConfig,
)

GateStatus = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class GateResult:
    """The verdict of one gate on a candidate."""

    name: str
    status: GateStatus
    value: float | None
    """The measured value; None when nothing could be measured."""
    bound: float | None
    """The value that the gate compares with."""
    detail: str
    """One line for the person who reviews the candidate."""


@dataclass(frozen=True)
class ScoredAnswer:
    """A held-out answer under three policies; log-probabilities are summed over its tokens."""

    behaviour: float
    """Under the policy that served it, as logged."""
    champion: float
    candidate: float
    reward: float | None
    """None when nobody rated it."""


@dataclass(frozen=True)
class RewardEstimate:
    """The reward of the candidate, estimated from logs."""

    difference: float
    """Reward of the candidate minus that of the champion."""
    low: float
    """Lower end of the confidence interval around `difference`."""
    high: float
    """Upper end of it."""
    ess: float
    """Effective number of answers."""
    num_answers: int
    """Answers that somebody rated."""
    snips: float
    """Self-normalised estimate of the candidate's reward."""


def finite_gate(*, num_nonfinite: int) -> GateResult:
    """Fails when a weight is infinite or not a number."""
    status: GateStatus = "failed" if num_nonfinite else "passed"
    return GateResult(
        "finite", status, float(num_nonfinite), 0.0, f"{num_nonfinite} weights are not finite"
    )


def drift_gate(*, k3: float | None, num_tokens: int, config: DriftGateConfig) -> GateResult:
    """Fails when the candidate is too far from the champion on what users ask."""
    if not config.enabled:
        return GateResult("drift", "skipped", k3, config.max_k3, "disabled in the configuration")
    if k3 is None or num_tokens < config.min_tokens:
        return GateResult(
            "drift",
            "skipped",
            k3,
            config.max_k3,
            f"not enough evidence: {num_tokens} held-out tokens, {config.min_tokens} needed",
        )
    status: GateStatus = "passed" if k3 <= config.max_k3 else "failed"
    return GateResult(
        "drift", status, k3, config.max_k3, f"k3 over {num_tokens} held-out tokens, nats"
    )


def perplexity_gate(*, candidate: float, base: float, config: PerplexityGateConfig) -> GateResult:
    """Fails when the candidate knows general language much worse than version 1."""
    ratio = candidate / base
    if not config.enabled:
        return GateResult(
            "perplexity", "skipped", ratio, config.max_ratio, "disabled in the configuration"
        )
    status: GateStatus = "passed" if ratio <= config.max_ratio else "failed"
    detail = f"perplexity {candidate:.2f}; version 1 has {base:.2f}"
    return GateResult("perplexity", status, ratio, config.max_ratio, detail)


def reward_gate(answers: Sequence[ScoredAnswer], config: RewardGateConfig) -> GateResult:
    """Fails only when the logs rule out that the candidate is about as good as the champion."""
    if not config.enabled:
        return GateResult(
            "reward", "skipped", None, -config.margin, "disabled in the configuration"
        )
    estimate = estimate_reward(answers, max_weight=config.max_weight, confidence=config.confidence)
    if estimate is None:
        detail = "not enough evidence: fewer than two rated held-out answers"
        return GateResult("reward", "skipped", None, -config.margin, detail)
    detail = (
        f"candidate minus champion {estimate.difference:+.3f}"
        f" [{estimate.low:+.3f}, {estimate.high:+.3f}], {estimate.ess:.0f} effective of"
        f" {estimate.num_answers} rated answers, SNIPS {estimate.snips:+.3f};"
        f" fails when the upper end is below {-config.margin:+.3f}"
    )
    if not _has_evidence(estimate, config):
        detail = f"not enough evidence: {detail}"
        return GateResult("reward", "skipped", estimate.difference, -config.margin, detail)
    status: GateStatus = "passed" if estimate.high >= -config.margin else "failed"
    return GateResult("reward", status, estimate.difference, -config.margin, detail)


def _has_evidence(estimate: RewardEstimate, config: RewardGateConfig) -> bool:
    return (
        estimate.ess >= config.min_ess
        and estimate.ess >= config.min_ess_fraction * estimate.num_answers
    )


def estimate_reward(
    answers: Sequence[ScoredAnswer], *, max_weight: float, confidence: float
) -> RewardEstimate | None:
    """Estimate the reward that the candidate would have got; None for fewer than two rated answers.

    The estimate is mean((w - v)(r - b)) with a normal interval. w and v are the importance weights
    of an answer under candidate and champion against the policy that served it, clipped at
    `max_weight`. When the champion served all answers, v = 1 and the estimator becomes
    mean((w - 1)(r - b)), whose variance vanishes with the size of the update. b is the mean reward;
    it adds a bias of order 1/n and removes most of the variance.

    Args:
        answers: Held-out answers; those without a reward are left out.
        max_weight: Bound on w and v, above 1.
        confidence: Two-sided level of the interval, between 0 and 1.
    """
    rated = [answer for answer in answers if answer.reward is not None]
    if len(rated) < 2:
        return None
    weights = [_weight(answer.candidate - answer.behaviour, max_weight) for answer in rated]
    champions = [_weight(answer.champion - answer.behaviour, max_weight) for answer in rated]
    rewards = [answer.reward for answer in rated if answer.reward is not None]
    baseline = math.fsum(rewards) / len(rewards)
    terms = [
        (weight - champion) * (reward - baseline)
        for weight, champion, reward in zip(weights, champions, rewards, strict=True)
    ]
    mean = math.fsum(terms) / len(terms)
    variance = math.fsum((term - mean) ** 2 for term in terms) / (len(terms) - 1)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance / len(terms))
    total = math.fsum(weights)
    return RewardEstimate(
        difference=mean,
        low=mean - half,
        high=mean + half,
        ess=total**2 / math.fsum(weight**2 for weight in weights),
        num_answers=len(rated),
        snips=math.fsum(w * r for w, r in zip(weights, rewards, strict=True)) / total,
    )


def _weight(log_ratio: float, max_weight: float) -> float:
    # The logarithm is bounded so that exp does not overflow and a sum of weights is above zero.
    return math.exp(min(max(log_ratio, -20.0), math.log(max_weight)))


def none_failed(results: Sequence[GateResult]) -> bool:
    """Whether no gate refuses the candidate; skipped gates do not."""
    return not any(result.status == "failed" for result in results)


def missing_evidence(results: Sequence[GateResult], config: GatesConfig) -> str | None:
    """Why a person has to decide; None when the gates are enough.

    A candidate whose drift could not be measured may have changed in any way. A skipped reward gate
    needs no person, because few rated answers are normal.
    """
    if not config.drift.enabled:
        return None
    skipped = (each for each in results if each.name == "drift" and each.status == "skipped")
    return next((f"{each.name}: {each.detail}" for each in skipped), None)


def report(results: Sequence[GateResult], *, headline: str) -> str:
    """The description of a version in the registry: the headline and a Markdown table."""
    lines = [headline, "", "| gate | verdict | value | bound | detail |", "|---|---|---|---|---|"]
    lines += [
        f"| {result.name} | {result.status} | {_number(result.value)} | {_number(result.bound)}"
        f" | {result.detail} |"
        for result in results
    ]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
