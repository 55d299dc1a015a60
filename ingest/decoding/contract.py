"""The event contract, and what happens to an event that breaks it.

A record becomes a *dead letter*, kept byte for byte with its reason, when its meaning is unclear:
it is not JSON, has another schema version, has a field of a wrong type, or names token ids that do
not exist. The same happens to an event that claims to be trainable although its lengths disagree or
its version spans do not tile the completion, because its writer counted wrong; and to an event
whose prefix is longer than its parent, because its prompt cannot be put together.

An event is stored as *untrainable* when it says so itself, whatever it lacks, and when it is whole
but fails the rule for what may be learned from (`rollout_store.trainability`). It was served, so it
is logged.
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
    """The kinds of dead letters; every reason begins with one."""

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
    """Raised for a record that becomes a dead letter of this `kind`."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def check_shape(body: Any) -> None:  # noqa: ANN401 - a generated struct
    """Check that choices, lengths and spans of an interaction agree with each other.

    Lengths and spans of an event that calls itself untrainable may disagree.

    Raises:
        BrokenEvent: They do not agree.
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
    """Check that the parent has as many tokens as the prefix.

    Args:
        body: The interaction.
        parent_length: Tokens of the parent's prompt and completion; None when not known.

    Raises:
        BrokenEvent: The prefix is longer than the parent.
    """
    if parent_length is not None and body.prefix_length > parent_length:
        raise BrokenEvent(
            Kind.PREFIX,
            f"prefix_length {body.prefix_length} is longer than its parent of {parent_length}",
        )


def check_vocabulary(body: Any, vocab_size: int) -> None:  # noqa: ANN401
    """Check that every token id of an interaction exists.

    Args:
        body: The interaction.
        vocab_size: Token ids are below it; 0 when it is not known.

    Raises:
        BrokenEvent: Names the first id that does not exist.
    """
    for packed in _token_arrays(body):
        ids = np.frombuffer(packed, dtype="<i4")
        wrong = ids[_is_outside(ids, vocab_size)]
        if len(wrong):
            bound = f" of a vocabulary of {vocab_size}" if vocab_size else ""
            raise BrokenEvent(Kind.VOCABULARY, f"token id {wrong[0]} is not one{bound}")


def all_in_vocabulary(bodies: Sequence[Any], vocab_size: int) -> bool:
    """Whether `check_vocabulary` would pass for all interactions; faster than one by one."""
    packed = b"".join([array for body in bodies for array in _token_arrays(body)])
    return not _is_outside(np.frombuffer(packed, dtype="<i4"), vocab_size).any()


def all_usable(choices: Sequence[Any]) -> bool:
    """Whether learning can use all log-probabilities of the completions; faster than one by one."""
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
