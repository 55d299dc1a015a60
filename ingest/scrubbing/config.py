"""Configuration of scrubbing: what to look for in text, and what to do with findings."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from onlinerl.base_config import Config

Action = Literal["drop", "mask_span", "keep"]
BUILT_IN = ("email", "phone", "card", "iban", "ip", "secret")
"""Rules that need no pattern; `rules` documents what each finds."""


class ScrubRule(Config):
    """One kind of data to look for."""

    name: str = Field(min_length=1, max_length=64)
    """`email`, `phone`, `card`, `iban`, `ip` or `secret`; any other name needs a `pattern`."""

    action: Action = "mask_span"
    """`drop`: the row is not stored. `mask_span`: its tokens are kept out of the loss and of every
    decoded view; in feedback a marker takes its place. `keep`: it is only counted."""

    pattern: str = Field(default="", max_length=4096)
    """Regular expression of a rule of your own. One that backtracks without bound stops ingest."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _is_built_in_or_has_a_pattern(self) -> Self:
        if not self.pattern and self.name not in BUILT_IN:
            raise ValueError(
                f"scrub rule {self.name!r} has no pattern and is none of {', '.join(BUILT_IN)}"
            )
        return self


class PresidioConfig(Config):
    """Names and other entities that patterns miss, found by Microsoft Presidio.

    Needs the extra `onlinerl[presidio]` and a language model of spaCy's, installed beforehand:
    nothing is downloaded.
    """

    entities: tuple[str, ...] = ()
    """Entities to look for, e.g. `PERSON`, `LOCATION`; none switches Presidio off."""

    action: Action = "mask_span"
    """As for a rule."""

    language: str = Field(default="en", min_length=2, max_length=8)
    """Language of the text."""

    model: str = Field(default="en_core_web_sm", min_length=1, max_length=256)
    """Name or folder of the spaCy model."""

    min_score: float = Field(default=0.5, ge=0, le=1)
    """Findings that Presidio is less sure of do not count."""


class ScrubConfig(Config):
    """Personal data and secrets in prompts, completions and feedback.

    Text is looked at where it is stored, never where it is served. Off unless a rule is named.
    """

    rules: tuple[ScrubRule, ...] = ()
    """What to look for; where findings overlap, each action applies."""

    presidio: PresidioConfig = Field(default_factory=PresidioConfig)
    """An additional recogniser."""

    marker: str = Field(default="[removed]", max_length=64)
    """What takes the place of a finding in comments, demonstrations and tags."""

    @property
    def is_on(self) -> bool:
        """Whether anything is looked for."""
        return bool(self.rules or self.presidio.entities)

    @model_validator(mode="after")
    def _rule_names_differ(self) -> Self:
        names = [rule.name for rule in self.rules]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"scrub.rules names {', '.join(repeated)} more than once")
        return self
