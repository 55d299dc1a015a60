"""From a served answer to the event that is logged. Pure functions of values."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from onlinerl.rollout_store.schema import Arm, Completion, FinishReason, Sampling, VersionSpan

LOGPROB_FLOOR = -9999.0
"""What vLLM writes in place of a log-probability that is -inf, NaN or absent."""

SHAPING = ("frequency_penalty", "logit_bias", "presence_penalty")
"""Sampling parameters that move logits by what was sampled before, or by token."""


@dataclass
class Sampled:
    """What an engine sampled for one choice, as it was received."""

    choice_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    version_spans: list[VersionSpan] | None = None
    routed_experts: str | None = None

    def completion(self) -> Completion:
        """The logged form; nothing is padded or repaired."""
        return Completion(
            choice_index=self.choice_index,
            completion_token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=_finish_reason(self.finish_reason),
            version_spans=self.version_spans or [],
            routed_experts=self.routed_experts,
        )


def _finish_reason(reason: str | None) -> FinishReason:
    for known in get_args(FinishReason):
        if reason == known:
            result: FinishReason = known
            return result
    return "error"


def untrainable_reason(
    choices: Sequence[Completion],
    *,
    policy: str,
    sampling: Sampling,
    constrained: bool = False,
    arm: Arm = "champion",
) -> str | None:
    """Why an interaction cannot be learned from; None when it can.

    Args:
        choices: what was sampled.
        policy: whose versions may have sampled it.
        sampling: the parameters that shaped the distribution; those beside the declared ones
            are `SHAPING`.
        constrained: whether a grammar masked the distribution.
        arm: which deployment answered.
    """
    reason = _arm_fault(arm) or _sampling_fault(sampling, constrained=constrained)
    if reason is not None:
        return reason
    for choice in choices:
        reason = _choice_fault(choice, policy=policy)
        if reason is not None:
            return f"choice {choice.choice_index}: {reason}"
    return None


def _arm_fault(arm: Arm) -> str | None:
    # Nobody saw it, so no feedback is about it.
    return "a shadow answer was shown to nobody" if arm == "shadow" else None


def _sampling_fault(sampling: Sampling, *, constrained: bool) -> str | None:
    if sampling.temperature == 0:
        return "greedy sampling has no probability ratio"
    if sampling.top_p < 1 or sampling.top_k > 0:
        return "top_p or top_k cut the distribution and the kept set is not logged"
    if constrained:
        return "structured output masks the distribution and the kept set is not logged"
    for name in sampling.model_extra or {}:
        if name in SHAPING:
            return f"{name} changes the distribution in a way that a learner cannot reproduce"
    return None


def _choice_fault(choice: Completion, *, policy: str) -> str | None:
    if choice.finish_reason in ("abort", "error"):
        return f"the answer ended with {choice.finish_reason}"
    num_tokens = len(choice.completion_token_ids)
    if num_tokens == 0:
        return "no token was sampled"
    if len(choice.logprobs) != num_tokens:
        return f"{num_tokens} tokens have {len(choice.logprobs)} log-probabilities"
    if not all(map(math.isfinite, choice.logprobs)) or min(choice.logprobs) <= LOGPROB_FLOOR:
        return "a log-probability is missing or not finite"
    if not spans_tile(choice.version_spans, num_tokens=num_tokens):
        return "the version spans do not tile the completion"
    own = re.compile(rf"{re.escape(policy)}/[1-9][0-9]*")
    for span in choice.version_spans:
        if own.fullmatch(span.version) is None:
            return f"{span.version!r} is not a version of {policy!r}"
    return None


def spans_tile(spans: Sequence[VersionSpan], *, num_tokens: int) -> bool:
    """Whether the spans cover every token once, in order."""
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == num_tokens


def clip_spans(spans: Sequence[VersionSpan], *, num_tokens: int) -> list[VersionSpan]:
    """The spans of the first `num_tokens` tokens."""
    return [
        VersionSpan(version=span.version, start=span.start, end=min(span.end, num_tokens))
        for span in spans
        if span.start < num_tokens
    ]
