"""Whether a learner may use an answer. Pure functions of values."""

from collections.abc import Sequence

from onlinerl.rollout_store.schema import Arm, Completion, Sampling
from onlinerl.rollout_store.trainability import completion_fault, request_fault


def untrainable_reason(
    choices: Sequence[Completion],
    *,
    policy: str,
    sampling: Sampling,
    constrained: bool = False,
    arm: Arm = "champion",
) -> str | None:
    """Why an interaction cannot be learned from; None when it can.

    The rule is `rollout_store.trainability`. An event carries one verdict, so one bad choice makes
    all of them untrainable.

    Args:
        choices: The completions, as sampled.
        policy: Name of the policy; only its versions may have sampled them.
        sampling: Parameters that shaped the distribution.
        constrained: Whether a grammar masked the distribution.
        arm: The arm that answered.
    """
    fault = request_fault(
        arm=arm,
        sampling=sampling,
        other_parameters=sampling.model_extra or {},
        constrained=constrained,
    )
    if fault is not None:
        return fault.text
    for choice in choices:
        fault = completion_fault(choice, policy=policy)
        if fault is not None:
            return f"choice {choice.choice_index}: {fault.text}"
    return None
