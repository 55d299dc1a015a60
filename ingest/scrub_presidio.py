"""Microsoft Presidio as a Scrubber: names, places and what else patterns miss."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from onlinerl.errors import DependencyMissing
from onlinerl.ingest.scrub_config import PresidioConfig
from onlinerl.ingest.scrubber import Finding


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
        """What is in the text."""
        ...


class PresidioScrubber:
    """Asks an analyzer; its findings are named `presidio.ENTITY`."""

    def __init__(self, analyzer: Analyzer, *, config: PresidioConfig) -> None:
        self._analyzer = analyzer
        self._config = config

    def find(self, text: str) -> list[Finding]:
        """Entities that are asked for and sure enough."""
        results = self._analyzer.analyze(
            text,
            self._config.language,
            entities=list(self._config.entities),
            score_threshold=self._config.min_score,
        )
        return [
            Finding(
                rule=f"presidio.{each.entity_type}",
                action=self._config.action,
                start=each.start,
                end=each.end,
            )
            for each in results
        ]


def open_analyzer(config: PresidioConfig) -> Analyzer:
    """Presidio with a spaCy model that is there already: Presidio itself would download one.

    Raises:
        DependencyMissing: one of them is not installed.
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
