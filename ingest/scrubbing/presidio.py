"""Microsoft Presidio as a Scrubber: finds names, places and other entities that patterns miss."""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from onlinerl.errors import DependencyMissing
from onlinerl.ingest.scrubbing.config import PresidioConfig
from onlinerl.ingest.scrubbing.scrubber import Finding, Scrubber

_PIECE_CHARS = 100_000
"""Longest text that is analysed at once. spaCy needs about 1 GB for it, and refuses texts ten times
as long."""
_OVERLAP_CHARS = 1_000
"""Neighbouring pieces overlap, so that every entity is whole in one of them."""

_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
"""A byte that is not UTF-8, as `TokenText` decodes it; spaCy refuses it."""


class Recognized(Protocol):
    """One result of Presidio."""

    entity_type: str
    start: int
    end: int
    score: float


class Analyzer(Protocol):
    """The part of `presidio_analyzer.AnalyzerEngine` that is used."""

    def analyze(
        self, text: str, language: str, *, entities: list[str], score_threshold: float
    ) -> Sequence[Recognized]:
        """The entities in the text."""
        ...


class PresidioScrubber(Scrubber):
    """Finds entities with Presidio; the findings are named `presidio.ENTITY`."""

    def __init__(self, analyzer: Analyzer, *, config: PresidioConfig) -> None:
        self._analyzer = analyzer
        self._config = config

    @override
    def find(self, text: str) -> list[Finding]:
        """Entities of the configured kinds, from the configured score on."""
        whole = _HALF_A_CHARACTER.sub("\ufffd", text)
        # A set, because an entity in an overlap is found twice.
        findings = {
            Finding(
                rule=f"presidio.{each.entity_type}",
                action=self._config.action,
                start=at + each.start,
                end=at + each.end,
            )
            for at, piece in _pieces(whole)
            for each in self._analyze(piece)
        }
        return list(findings)

    def _analyze(self, piece: str) -> Sequence[Recognized]:
        return self._analyzer.analyze(
            piece,
            self._config.language,
            entities=list(self._config.entities),
            score_threshold=self._config.min_score,
        )


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """The position and text of each piece, short enough to be analysed."""
    step = _PIECE_CHARS - _OVERLAP_CHARS
    for at in range(0, max(len(text) - _OVERLAP_CHARS, 1), step):
        yield at, text[at : at + _PIECE_CHARS]


def open_analyzer(config: PresidioConfig) -> Analyzer:
    """Presidio with an installed spaCy model; Presidio itself would download a missing one.

    Raises:
        DependencyMissing: Presidio, spaCy or the model is not installed.
    """
    try:
        spacy: Any = import_module("spacy")
        presidio: Any = import_module("presidio_analyzer")
        nlp_engine: Any = import_module("presidio_analyzer.nlp_engine")
    except ImportError as error:
        raise DependencyMissing(
            f"{error}; scrub.presidio needs the extra: pip install 'onlinerl[presidio]'"
        ) from error
    if not (spacy.util.is_package(config.model) or Path(config.model).is_dir()):
        raise DependencyMissing(
            f"the spaCy model {config.model!r} is not installed; install it, or set "
            "scrub.presidio.model to one that is"
        )
    models = [{"lang_code": config.language, "model_name": config.model}]
    provider = nlp_engine.NlpEngineProvider(
        nlp_configuration={"nlp_engine_name": "spacy", "models": models}
    )
    analyzer: Analyzer = presidio.AnalyzerEngine(
        nlp_engine=provider.create_engine(), supported_languages=[config.language]
    )
    return analyzer
