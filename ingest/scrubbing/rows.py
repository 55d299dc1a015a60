"""Scrubs rows before they are stored.

Logged tokens are never changed: they would no longer be what was served. Findings in a prompt or a
completion are stored as spans of tokens, which the loss and every decoded view leave out. Findings
in comments, demonstrations and tags are replaced in the text.

Each row is scrubbed alone, so a secret that begins in the parent's tokens is not found.
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
from onlinerl.ingest.scrubbing.scrubber import Finding, Scrubber, merge_spans, replace_spans
from onlinerl.ingest.scrubbing.tokens import TokenBytesOf, TokenText

_TEXTS = ("comment", "demonstration")


@dataclass
class ScrubResult:
    """The rows to store, and what was found in all rows."""

    rows: pa.Table
    findings: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of findings by rule and action."""
    num_dropped: int = 0
    """Number of rows that are not stored."""


class RowScrubber:
    """Scrubs the rows of `interactions` and `feedback`.

    Args:
        config: Only its marker is used.
        scrubbers: Look for findings in every text.
        bytes_of: Bytes of a token, by the tokenizer that made the tokens.
    """

    def __init__(
        self, config: ScrubConfig, *, scrubbers: Sequence[Scrubber], bytes_of: TokenBytesOf
    ) -> None:
        self._marker = config.marker
        self._scrubbers = scrubbers
        self._bytes_of = bytes_of

    def scrub(self, table: str, rows: pa.Table) -> ScrubResult:
        """The rows to store, with masks and markers.

        Args:
            table: `interactions` or `feedback`.
            rows: Rows of that table.
        """
        result = ScrubResult(rows)
        if not rows.num_rows:
            return result
        keep = [True] * rows.num_rows
        if table == "interactions":
            self._mask(result, "prompt_token_ids", "prompt_mask_spans", keep)
            self._mask(result, "completion_token_ids", "mask_spans", keep)
        else:
            for name in _TEXTS:
                self._change(result, name, keep, self._text)
        self._change(result, "tags", keep, self._tags)
        # Rows are dropped last, so that `keep` and the rows have the same positions until then.
        if not all(keep):
            result.num_dropped = keep.count(False)
            result.rows = result.rows.filter(pa.array(keep, pa.bool_()))
        return result

    def _mask(self, result: ScrubResult, tokens: str, spans: str, keep: list[bool]) -> None:
        known: list[list[dict[str, int]] | None] = result.rows[spans].to_pylist()
        changed = False
        for number, token_ids in enumerate(_lists(result.rows[tokens])):
            text = TokenText(token_ids, bytes_of=self._bytes_of)
            masked = self._find(result, text.text, keep, number)
            masked_tokens = text.tokens_of(masked)
            if masked_tokens:
                before = [(span["start"], span["end"]) for span in known[number] or ()]
                both = merge_spans([*before, *masked_tokens])
                known[number] = [{"start": start, "end": end} for start, end in both]
                changed = True
        if changed:
            result.rows = _with_column(result.rows, spans, known)

    def _change(
        self,
        result: ScrubResult,
        name: str,
        keep: list[bool],
        change: Callable[[ScrubResult, Any, list[bool], int], Any],
    ) -> None:
        values = result.rows[name].to_pylist()
        changed = [
            value if not value else change(result, value, keep, number)
            for number, value in enumerate(values)
        ]
        if changed != values:
            result.rows = _with_column(result.rows, name, changed)

    def _text(self, result: ScrubResult, text: str, keep: list[bool], number: int) -> str:
        masked = self._find(result, text, keep, number)
        return replace_spans(text, masked, marker=self._marker) if masked else text

    def _tags(
        self, result: ScrubResult, tags: list[tuple[str, str]], keep: list[bool], number: int
    ) -> list[tuple[str, str]]:
        return [(key, self._text(result, value, keep, number)) for key, value in tags]

    def _find(self, result: ScrubResult, text: str, keep: list[bool], number: int) -> list[Span]:
        """Count the findings, mark the row if it must be dropped, and return the spans to mask."""
        findings = [finding for scrubber in self._scrubbers for finding in scrubber.find(text)]
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
