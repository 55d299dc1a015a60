"""Scrubbing of rows before they are stored.

Logged tokens are never changed: they would no longer be what was served. What is found in a
prompt or a completion is written down as spans of tokens that are kept out of the loss and of every
decoded view. Comments, demonstrations and tags are text of their own and are changed.

A secret whose first half belongs to the parent's tokens is not seen: each row is looked at alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from onlinerl.ingest.scrubbing.config import ScrubConfig
from onlinerl.ingest.scrubbing.rules import Span
from onlinerl.ingest.scrubbing.scrubber import Finding, Scrubber, merged, replaced
from onlinerl.ingest.scrubbing.tokens import TokenBytesOf, TokenText

_TEXTS = ("comment", "demonstration")


@dataclass
class Scrubbed:
    """A table without what was to be dropped, and what was found."""

    rows: pa.Table
    findings: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By rule and action."""
    num_dropped: int = 0
    """Rows."""


class RowScrubber:
    """Looks at the rows of `interactions` and `feedback`.

    Args:
        config: The marker.
        scrubbers: Asked about every text.
        bytes_of: The tokenizer that the tokens are of.
    """

    def __init__(
        self, config: ScrubConfig, *, scrubbers: Sequence[Scrubber], bytes_of: TokenBytesOf
    ) -> None:
        self._marker = config.marker
        self._scrubbers = scrubbers
        self._bytes_of = bytes_of

    def scrub(self, table: str, rows: pa.Table) -> Scrubbed:
        """The rows that may be stored, as they may be stored."""
        result = Scrubbed(rows)
        if not rows.num_rows:
            return result
        keep = [True] * rows.num_rows
        if table == "interactions":
            # Before anything is dropped: rows of one request share a prompt and are neighbours.
            self._mask(result, "prompt_token_ids", "prompt_mask_spans", keep)
            self._mask(result, "completion_token_ids", "mask_spans", keep)
        else:
            for name in _TEXTS:
                self._change(result, name, keep, self._text)
        self._change(result, "tags", keep, self._tags)
        if not all(keep):
            result.num_dropped = keep.count(False)
            result.rows = result.rows.filter(pa.array(keep, pa.bool_()))
        return result

    def _mask(self, result: Scrubbed, tokens: str, spans: str, keep: list[bool]) -> None:
        known: list[list[dict[str, int]] | None] = result.rows[spans].to_pylist()
        changed = False
        for number, token_ids in enumerate(_lists(result.rows[tokens])):
            text = TokenText(token_ids, bytes_of=self._bytes_of)
            masked = self._judge(result, text.text, keep, number)
            found = text.tokens_of(masked)
            if found:
                before = [(span["start"], span["end"]) for span in known[number] or ()]
                both = merged([*before, *found])
                known[number] = [{"start": start, "end": end} for start, end in both]
                changed = True
        if changed:
            result.rows = _with_column(result.rows, spans, known)

    def _change(
        self,
        result: Scrubbed,
        name: str,
        keep: list[bool],
        change: Callable[[Scrubbed, Any, list[bool], int], Any],
    ) -> None:
        values = result.rows[name].to_pylist()
        changed = [
            value if not value else change(result, value, keep, number)
            for number, value in enumerate(values)
        ]
        if changed != values:
            result.rows = _with_column(result.rows, name, changed)

    def _text(self, result: Scrubbed, text: str, keep: list[bool], number: int) -> str:
        masked = self._judge(result, text, keep, number)
        return replaced(text, masked, marker=self._marker) if masked else text

    def _tags(
        self, result: Scrubbed, tags: list[tuple[str, str]], keep: list[bool], number: int
    ) -> list[tuple[str, str]]:
        return [(key, self._text(result, value, keep, number)) for key, value in tags]

    def _judge(self, result: Scrubbed, text: str, keep: list[bool], number: int) -> list[Span]:
        """Counts what is in the text, notes whether the row goes; returns what is to be masked."""
        findings = [found for scrubber in self._scrubbers for found in scrubber.find(text)]
        result.findings.update((each.rule, each.action) for each in findings)
        if any(each.action == "drop" for each in findings):
            keep[number] = False
        return list(_masked(findings))


def _masked(findings: Iterable[Finding]) -> Iterable[Span]:
    return ((each.start, each.end) for each in findings if each.action == "mask_span")


def _lists(column: pa.ChunkedArray) -> Iterable[list[int]]:
    for chunk in column.chunks:
        values = np.asarray(chunk.values)
        offsets = np.asarray(chunk.offsets)
        for start, end in pairwise(offsets):
            yield values[start:end].tolist()


def _with_column(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    place = rows.schema.get_field_index(name)
    kind = rows.schema.field(name)
    return rows.set_column(place, kind, pa.array(values, kind.type))
