"""Finds personal data and secrets in text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from onlinerl.ingest.scrubbing.config import Action, ScrubConfig, ScrubRule
from onlinerl.ingest.scrubbing.rules import FINDERS, Finder, Span


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that a rule found."""

    rule: str
    action: Action
    start: int
    """In characters."""
    end: int
    """Exclusive."""


class Scrubber(Protocol):
    """Looks at one text."""

    def find(self, text: str) -> Sequence[Finding]:
        """What is in it, in any order; findings may overlap."""
        ...


class RuleScrubber:
    """The built-in rules and those with a pattern of their own."""

    def __init__(self, rules: Sequence[ScrubRule]) -> None:
        self._rules = [(rule, _finder(rule)) for rule in rules]

    def find(self, text: str) -> list[Finding]:
        """As each rule says; an empty match is none."""
        return [
            Finding(rule=rule.name, action=rule.action, start=start, end=end)
            for rule, finder in self._rules
            for start, end in finder(text)
            if start < end
        ]


def scrubbers(config: ScrubConfig) -> list[Scrubber]:
    """Those that the configuration asks for.

    Raises:
        DependencyMissing: Presidio or its language model is asked for and not installed.
    """
    chosen: list[Scrubber] = [RuleScrubber(config.rules)] if config.rules else []
    if config.presidio.entities:
        from onlinerl.ingest.scrubbing.presidio import PresidioScrubber, open_analyzer

        chosen.append(PresidioScrubber(open_analyzer(config.presidio), config=config.presidio))
    return chosen


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same characters in as few spans as possible, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def replaced(text: str, spans: Iterable[Span], *, marker: str) -> str:
    """The text with the marker in place of every span."""
    pieces, at = [], 0
    for start, end in merged(spans):
        pieces += [text[at:start], marker]
        at = end
    return "".join([*pieces, text[at:]])


def _finder(rule: ScrubRule) -> Finder:
    if not rule.pattern:
        return FINDERS[rule.name]
    pattern = re.compile(rule.pattern)
    return lambda text: (match.span() for match in pattern.finditer(text))
