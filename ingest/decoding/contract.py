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

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from onlinerl.errors import InvalidEvent


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
        num_tokens = len(choice.completion_token_ids) // 4
        if len(choice.logprobs) // 4 != num_tokens:
            raise BrokenEvent(
                Kind.LENGTHS, f"{len(choice.logprobs) // 4} logprobs for {num_tokens} tokens"
            )
        if not spans_tile(choice.version_spans, num_tokens):
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


def all_finite(choices: Sequence[Any]) -> bool:
    """Whether every log-probability of these completions is finite."""
    packed = b"".join([choice.logprobs for choice in choices])
    return bool(np.isfinite(np.frombuffer(packed, dtype="<f4")).all())


def why_untrainable(body: Any, choice: Any, *, check_finite: bool = True) -> str | None:  # noqa: ANN401
    """What a completion that broke no promise misses for learning, or None.

    Args:
        body: The interaction.
        choice: The completion.
        check_finite: False when its log-probabilities are known to be finite.
    """
    if not body.trainable:
        return body.untrainable_reason or "the gateway gave no reason"
    if body.parent_id is None and body.prefix_length:
        return "prefix_length without a parent"
    if not body.prompt_token_ids and not body.prefix_length:
        return "no prompt tokens"
    if check_finite and not np.isfinite(np.frombuffer(choice.logprobs, dtype="<f4")).all():
        return "a logprob is not finite"
    return None


def spans_tile(spans: Sequence[Any], num_tokens: int) -> bool:
    """Whether the spans cover the tokens from the first to the last, in order and without gaps."""
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    return at == num_tokens


def _token_arrays(body: Any) -> list[bytes]:  # noqa: ANN401
    return [body.prompt_token_ids, *(choice.completion_token_ids for choice in body.choices)]


def _is_outside(ids: "np.ndarray[Any, np.dtype[np.int32]]", vocab_size: int) -> Any:  # noqa: ANN401
    outside = ids < 0
    return outside | (ids >= vocab_size) if vocab_size else outside
