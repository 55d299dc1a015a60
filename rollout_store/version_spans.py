"""Version spans: which policy version sampled which tokens of a completion."""

from collections.abc import Sequence
from typing import Protocol

from onlinerl.rollout_store.schema import VersionSpan


class Span(Protocol):
    """A `VersionSpan`, or ingest's decoded form of one."""

    @property
    def version(self) -> str:
        """Policy version as the engine stamped it, e.g. `assistant/12`."""
        ...

    @property
    def start(self) -> int:
        """Position of the first token."""
        ...

    @property
    def end(self) -> int:
        """Position after the last token."""
        ...


def spans_tile(spans: Sequence[Span], *, num_tokens: int) -> bool:
    """Whether the spans cover tokens 0 to `num_tokens` exactly once, in order, none of them empty.

    No spans tile no tokens.
    """
    position = 0
    for span in spans:
        if span.start != position or span.end <= position:
            return False
        position = span.end
    return position == num_tokens


def clip_spans(spans: Sequence[Span], *, num_tokens: int) -> list[VersionSpan]:
    """The spans of the first `num_tokens` tokens."""
    return [
        VersionSpan(version=span.version, start=span.start, end=min(span.end, num_tokens))
        for span in spans
        if span.start < num_tokens
    ]
