"""The rule for which completions may be learned from, declared once.

The gateway applies it to what it logs and writes the verdict into the event (`trainable` and
`untrainable_reason`). Ingest applies it again to every event that claims to be trainable, because
not every writer is our gateway, and stores the verdict in the same columns.

So readers of the tables need only `trainable`. Those that compute losses also use
`request_fault_sql`, which repeats the part of the rule that small columns show: it protects them
from rows that an older ingest stored without checking. The rule does not cover consent, reward,
age, length and scrubbed tokens: these belong to one reader, or are not known when the event is
written.
"""

import math
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from onlinerl.rollout_store.policy_version import PolicyVersion
from onlinerl.rollout_store.schema import Arm, FinishReason, LogprobMode
from onlinerl.rollout_store.version_spans import Span, spans_tile

LOGPROB_FLOOR = -9999.0
"""What vLLM writes in place of a log-probability that is -inf, NaN or absent."""

SHAPING = ("frequency_penalty", "logit_bias", "presence_penalty")
"""Sampling parameters that move logits by what was sampled before, or by token."""

_NUMBER_BYTES = 4
_SHOWN_CHARACTERS = 200


class Reason(StrEnum):
    """Every reason that the rule knows; `Fault.text` explains it."""

    UNEXPLAINED = "unexplained"
    NO_PARENT = "no_parent"
    NO_PROMPT = "no_prompt"
    SHADOW = "shadow"
    GREEDY = "greedy"
    RAW_LOGPROBS = "raw_logprobs"
    TRUNCATED_SAMPLING = "truncated_sampling"
    CONSTRAINED = "constrained"
    SHAPED = "shaped"
    BROKEN_OFF = "broken_off"
    NO_TOKENS = "no_tokens"
    LENGTHS = "lengths"
    LOGPROBS = "logprobs"
    SPANS = "spans"
    VERSION = "version"


_TEXTS = {
    Reason.UNEXPLAINED: "the gateway gave no reason",
    Reason.NO_PARENT: "prefix_length without a parent",
    Reason.NO_PROMPT: "no prompt tokens",
    # No user saw the answer, so no feedback is about it.
    Reason.SHADOW: "a shadow answer was shown to nobody",
    Reason.GREEDY: "greedy sampling has no probability ratio",
    Reason.RAW_LOGPROBS: "the log-probabilities are not those of the served distribution",
    Reason.TRUNCATED_SAMPLING: (
        "top_p or top_k cut the distribution and the kept set is not logged"
    ),
    Reason.CONSTRAINED: ("structured output masks the distribution and the kept set is not logged"),
    Reason.SHAPED: "{name} changes the distribution in a way that a learner cannot reproduce",
    Reason.BROKEN_OFF: "the answer ended with {finish_reason}",
    Reason.NO_TOKENS: "no token was sampled",
    Reason.LENGTHS: "{num_tokens} tokens have {num_logprobs} log-probabilities",
    Reason.LOGPROBS: "a log-probability is missing or not finite",
    Reason.SPANS: "the version spans do not tile the completion",
    Reason.VERSION: "{version!r} is not a version of {policy!r}",
}


class Fault(NamedTuple):
    """Why a completion cannot be learned from."""

    reason: Reason
    text: str
    """What the column `untrainable_reason` says."""


class SamplingParameters(Protocol):
    """The `Sampling` of an event, or ingest's decoded form of it."""

    @property
    def temperature(self) -> float:
        """Divides the logits; 0 is greedy."""
        ...

    @property
    def top_p(self) -> float:
        """Below 1 only the most probable tokens may be sampled."""
        ...

    @property
    def top_k(self) -> int:
        """Above 0 only so many tokens may be sampled."""
        ...


class SampledCompletion(Protocol):
    """A `Completion`, or ingest's decoded form of one, in which both lists are packed bytes."""

    @property
    def completion_token_ids(self) -> Sequence[int] | bytes:
        """Every sampled token."""
        ...

    @property
    def logprobs(self) -> Sequence[float] | bytes:
        """One for each token."""
        ...

    @property
    def finish_reason(self) -> FinishReason:
        """Why sampling ended."""
        ...

    @property
    def version_spans(self) -> Sequence[Span]:
        """Which version sampled which tokens."""
        ...


def fault_of(reason: Reason, **values: object) -> Fault:
    """The fault of a reason.

    Args:
        reason: One of the closed set.
        values: Fill the placeholders of its text.
    """
    return Fault(reason, _TEXTS[reason].format(**values))


def prompt_fault(
    *, num_prompt_tokens: int, prefix_length: int, parent_id: str | None
) -> Fault | None:
    """Why a prompt cannot be put together; None when it can.

    Args:
        num_prompt_tokens: Tokens after the prefix.
        prefix_length: Tokens that the prompt shares with its parent and does not repeat.
        parent_id: The interaction that the prompt continues.
    """
    if prefix_length and parent_id is None:
        return fault_of(Reason.NO_PARENT)
    if not prefix_length and not num_prompt_tokens:
        return fault_of(Reason.NO_PROMPT)
    return None


def request_fault(
    *,
    arm: Arm,
    sampling: SamplingParameters,
    logprob_mode: LogprobMode = "processed",
    other_parameters: Collection[str] = (),
    constrained: bool = False,
) -> Fault | None:
    """Why no answer to a request can be learned from; None when one may be.

    `request_fault_sql` is the same for rows, without the last two arguments.

    Args:
        arm: Which deployment answered.
        sampling: The parameters that shaped the served distribution.
        logprob_mode: Which distribution the log-probabilities are of.
        other_parameters: Names of the sampling parameters beside the declared ones.
        constrained: Whether a grammar masked the distribution. Events do not say so: only the
            gateway knows.
    """
    if arm == "shadow":
        return fault_of(Reason.SHADOW)
    if sampling.temperature <= 0:
        return fault_of(Reason.GREEDY)
    if logprob_mode != "processed":
        return fault_of(Reason.RAW_LOGPROBS)
    if sampling.top_p < 1 or sampling.top_k > 0:
        return fault_of(Reason.TRUNCATED_SAMPLING)
    if constrained:
        return fault_of(Reason.CONSTRAINED)
    for name in SHAPING:
        if name in other_parameters:
            return fault_of(Reason.SHAPED, name=name)
    return None


def request_fault_sql(row: str) -> str:
    """DuckDB expression over a row of `interactions`: a `Reason` as text, NULL for no fault.

    It agrees with `request_fault`. Use it together with the column `trainable`, which holds the
    verdict of the whole rule.

    Args:
        row: Name of the table in the query.
    """
    return f"""CASE
    WHEN {row}.arm = 'shadow' THEN '{Reason.SHADOW}'
    WHEN {row}.sampling.temperature <= 0 THEN '{Reason.GREEDY}'
    WHEN {row}.logprob_mode <> 'processed' THEN '{Reason.RAW_LOGPROBS}'
    WHEN {row}.sampling.top_p < 1 OR {row}.sampling.top_k > 0 THEN '{Reason.TRUNCATED_SAMPLING}'
  END"""


def completion_fault(
    completion: SampledCompletion, *, policy: str, check_logprobs: bool = True
) -> Fault | None:
    """Why a completion cannot be learned from; None when it can.

    Args:
        completion: What was sampled.
        policy: Only its versions may have sampled the completion.
        check_logprobs: False when `are_usable` is known to hold for the log-probabilities.
    """
    if completion.finish_reason in ("abort", "error"):
        return fault_of(Reason.BROKEN_OFF, finish_reason=completion.finish_reason)
    num_tokens = count_of(completion.completion_token_ids)
    num_logprobs = count_of(completion.logprobs)
    if num_tokens == 0:
        return fault_of(Reason.NO_TOKENS)
    if num_logprobs != num_tokens:
        return fault_of(Reason.LENGTHS, num_tokens=num_tokens, num_logprobs=num_logprobs)
    if check_logprobs and not are_usable(completion.logprobs):
        return fault_of(Reason.LOGPROBS)
    if not spans_tile(completion.version_spans, num_tokens=num_tokens):
        return fault_of(Reason.SPANS)
    for span in completion.version_spans:
        if PolicyVersion.find(span.version, policy=policy) is None:
            return fault_of(Reason.VERSION, version=span.version[:_SHOWN_CHARACTERS], policy=policy)
    return None


def are_usable(logprobs: Sequence[float] | bytes) -> bool:
    """Whether every log-probability is finite and above `LOGPROB_FLOOR`.

    Args:
        logprobs: Numbers, or packed little-endian float32.
    """
    if isinstance(logprobs, bytes):
        # numpy is imported late, so that the base of the store stays quick to import.
        import numpy as np

        packed = np.frombuffer(logprobs, dtype="<f4")
        # NaN fails both comparisons.
        return bool((packed > LOGPROB_FLOOR).all() and (packed < math.inf).all())
    return all(LOGPROB_FLOOR < logprob < math.inf for logprob in logprobs)


def count_of(numbers: Sequence[float] | bytes) -> int:
    """How many numbers there are, in a list or packed into four bytes each."""
    return len(numbers) // _NUMBER_BYTES if isinstance(numbers, bytes) else len(numbers)
