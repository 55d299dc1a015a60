"""What an event has promised, and what happens to one that broke a promise.

A record is *dead*, kept byte for byte with its reason, when nobody can tell what it means: it is
not JSON, is of another schema version, has a field of another type, or names token ids that do not
exist. So is an event that claims to be trainable although its lengths disagree or its version spans
do not tile, because whoever wrote it counted wrong, and one whose prefix is longer than the parent
it continues, because its prompt cannot be put together.

An event is *kept untrainable* when it says so itself, with whatever is missing in it, and when it
is whole but nothing can be learned from it: a log-probability that is not finite, no prompt, a
prefix without a parent. It was served, so it is logged.
"""

import json
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from onlinerl.errors import InvalidEvent
from onlinerl.rollout_store.trainability import (
    Reason,
    are_usable,
    completion_fault,
    count_of,
    fault_of,
    prompt_fault,
    request_fault,
)
from onlinerl.rollout_store.version_spans import spans_tile


class Kind(StrEnum):
    """The classes of dead letters; each reason begins with one."""

    EMPTY = "empty"
    NOT_JSON = "not_json"
    SCHEMA_VERSION = "schema_version"
    FIELDS = "fields"
    VALUE = "value"
    CHOICES = "choices"
    LENGTHS = "lengths"
    SPANS = "spans"
    VOCABULARY = "vocabulary"
    PREFIX = "prefix"


class BrokenEvent(InvalidEvent):
    """Raised for a record that becomes a dead letter; `kind` is its class."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def check_shape(body: Any) -> None:  # noqa: ANN401 - a generated struct
    """Whether choices, lengths and spans of an interaction agree with each other.

    Raises:
        BrokenEvent: when they do not, and the event did not say so itself.
    """
    if len(body.choices) > 1:
        numbers = [choice.choice_index for choice in body.choices]
        if len(set(numbers)) < len(numbers):
            raise BrokenEvent(Kind.CHOICES, f"choice_index repeats: {numbers}"[:1000])
    if not body.trainable:
        return
    for choice in body.choices:
        num_tokens = count_of(choice.completion_token_ids)
        num_logprobs = count_of(choice.logprobs)
        if num_logprobs != num_tokens:
            raise BrokenEvent(Kind.LENGTHS, f"{num_logprobs} logprobs for {num_tokens} tokens")
        if not spans_tile(choice.version_spans, num_tokens=num_tokens):
            raise BrokenEvent(Kind.SPANS, "version spans do not tile the completion")


def check_prefix(body: Any, parent_length: int | None) -> None:  # noqa: ANN401
    """Whether the parent is long enough for the prefix; `parent_length` None: it is not known.

    Raises:
        BrokenEvent: when it is not.
    """
    if parent_length is not None and body.prefix_length > parent_length:
        raise BrokenEvent(
            Kind.PREFIX,
            f"prefix_length {body.prefix_length} is longer than its parent of {parent_length}",
        )


def check_vocabulary(body: Any, vocab_size: int) -> None:  # noqa: ANN401
    """Whether every token id of an interaction can exist.

    Args:
        body: The interaction.
        vocab_size: Ids are below it; 0 when it is not known.

    Raises:
        BrokenEvent: naming the first id that cannot.
    """
    for packed in _token_arrays(body):
        ids = np.frombuffer(packed, dtype="<i4")
        wrong = ids[_is_outside(ids, vocab_size)]
        if len(wrong):
            bound = f" of a vocabulary of {vocab_size}" if vocab_size else ""
            raise BrokenEvent(Kind.VOCABULARY, f"token id {wrong[0]} is not one{bound}")


def all_in_vocabulary(bodies: Sequence[Any], vocab_size: int) -> bool:
    """Whether `check_vocabulary` would pass all of these, in one look over all tokens."""
    packed = b"".join([array for body in bodies for array in _token_arrays(body)])
    return not _is_outside(np.frombuffer(packed, dtype="<i4"), vocab_size).any()


def all_usable(choices: Sequence[Any]) -> bool:
    """Whether learning can use every log-probability of these completions; one look over all."""
    return are_usable(b"".join([choice.logprobs for choice in choices]))


def why_untrainable(
    body: Any,  # noqa: ANN401 - a generated struct
    choice: Any,  # noqa: ANN401
    *,
    extra: str | None = None,
    check_logprobs: bool = True,
) -> str | None:
    """Why a completion cannot be learned from, or None when it can.

    A claim to be trainable is verified by the rule that the gateway applies
    (`rollout_store.trainability`); a claim to be untrainable is believed.

    Args:
        body: The interaction.
        choice: The completion.
        extra: JSON of its undeclared fields, in which other sampling parameters are.
        check_logprobs: False when `all_usable` holds for its log-probabilities.
    """
    if not body.trainable:
        return body.untrainable_reason or fault_of(Reason.UNEXPLAINED).text
    fault = (
        prompt_fault(
            num_prompt_tokens=count_of(body.prompt_token_ids),
            prefix_length=body.prefix_length,
            parent_id=body.parent_id,
        )
        or request_fault(
            arm=body.arm,
            sampling=body.sampling,
            logprob_mode=body.logprob_mode,
            other_parameters=_other_parameters(extra),
        )
        or completion_fault(choice, policy=body.policy, check_logprobs=check_logprobs)
    )
    return None if fault is None else fault.text


def _other_parameters(extra: str | None) -> Collection[str]:
    """Names of the undeclared sampling parameters of an event."""
    return () if extra is None else json.loads(extra).get("sampling", ())


def _token_arrays(body: Any) -> list[bytes]:  # noqa: ANN401
    return [body.prompt_token_ids, *(choice.completion_token_ids for choice in body.choices)]


def _is_outside(ids: "np.ndarray[Any, np.dtype[np.int32]]", vocab_size: int) -> Any:  # noqa: ANN401
    outside = ids < 0
    return outside | (ids >= vocab_size) if vocab_size else outside
