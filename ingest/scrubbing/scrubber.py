"""Finds personal data and secrets in text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from onlinerl.ingest.scrubbing.config import Action, ScrubConfig, ScrubRule
from onlinerl.ingest.scrubbing.rules import FINDERS, Finder, Span


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A span of a text that a rule matched."""

    rule: str
    action: Action
    start: int
    """Position of the first character."""
    end: int
    """Position after the last character."""


class Scrubber(Protocol):
    """Looks for personal data and secrets in one text."""

    def find(self, text: str) -> Sequence[Finding]:
        """All findings, in any order; they may overlap."""
        ...


class RuleScrubber(Scrubber):
    """Applies built-in rules, and rules with a pattern of their own."""

    def __init__(self, rules: Sequence[ScrubRule]) -> None:
        self._rules = [(rule, _finder(rule)) for rule in rules]

    @override
    def find(self, text: str) -> list[Finding]:
        """Empty matches are left out."""
        return [
            Finding(rule=rule.name, action=rule.action, start=start, end=end)
            for rule, finder in self._rules
            for start, end in finder(text)
            if start < end
        ]


def make_scrubbers(config: ScrubConfig) -> list[Scrubber]:
    """The scrubbers that the configuration asks for.

    Raises:
        DependencyMissing: Presidio or its language model is configured and not installed.
    """
    scrubbers: list[Scrubber] = [RuleScrubber(config.rules)] if config.rules else []
    if config.presidio.entities:
        from onlinerl.ingest.scrubbing.presidio import PresidioScrubber, open_analyzer

        scrubbers.append(PresidioScrubber(open_analyzer(config.presidio), config=config.presidio))
    return scrubbers


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """The same positions in as few spans as possible, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def replace_spans(text: str, spans: Iterable[Span], *, marker: str) -> str:
    """The text with the marker in place of every span."""
    pieces, at = [], 0
    for start, end in merge_spans(spans):
        pieces += [text[at:start], marker]
        at = end
    return "".join([*pieces, text[at:]])


def _finder(rule: ScrubRule) -> Finder:
    if not rule.pattern:
        return FINDERS[rule.name]
    pattern = re.compile(rule.pattern)
    return lambda text: (match.span() for match in pattern.finditer(text))
