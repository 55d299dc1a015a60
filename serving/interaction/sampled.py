"""What an engine sampled for one choice, as it was received."""

from dataclasses import dataclass, field
from typing import get_args

from onlinerl.rollout_store.schema import Completion, FinishReason, VersionSpan


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
