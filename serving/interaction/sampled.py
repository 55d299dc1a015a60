"""What an engine sampled for one choice, as it was received."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from onlinerl.rollout_store.schema import Completion, FinishReason, VersionSpan

LOGPROB_FLOOR = -9999.0
"""vLLM writes this in place of a log-probability that is -inf, NaN or absent."""

SHAPING = ("frequency_penalty", "logit_bias", "presence_penalty")
"""Sampling parameters that change logits by the tokens sampled so far, or per token."""


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


def clip_spans(spans: Sequence[VersionSpan], *, num_tokens: int) -> list[VersionSpan]:
    """The spans of the first `num_tokens` tokens."""
    return [
        VersionSpan(version=span.version, start=span.start, end=min(span.end, num_tokens))
        for span in spans
        if span.start < num_tokens
    ]
