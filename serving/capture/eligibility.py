"""Whether a learner may use an answer. Pure functions of values."""

import math
import re
from collections.abc import Sequence

from onlinerl.rollout_store.schema import Arm, Completion, Sampling, VersionSpan
from onlinerl.serving.interaction.sampled import LOGPROB_FLOOR, SHAPING


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
        choices: The completions, as sampled.
        policy: Name of the policy; only its versions may have sampled them.
        sampling: Parameters that shaped the distribution. Undeclared ones are those in `SHAPING`.
        constrained: Whether a grammar masked the distribution.
        arm: The arm that answered.
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
    # Nobody saw the answer, so no feedback can be about it.
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
