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
    """`drop`: the row is not stored. `mask_span`: the tokens are left out of the loss and of every
    decoded view, and text in feedback is replaced by the marker. `keep`: the finding is only
    counted."""

    pattern: str = Field(default="", max_length=4096)
    """Regular expression of a rule of your own. Ingest hangs if it backtracks without bound."""

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

    Install the extra `onlinerl[presidio]` and a spaCy model first: nothing is downloaded.
    """

    entities: tuple[str, ...] = ()
    """Entities to look for, such as `PERSON` and `LOCATION`; none switches Presidio off."""

    action: Action = "mask_span"
    """What to do with a finding, as for a rule."""

    language: str = Field(default="en", min_length=2, max_length=8)
    """Language of the text."""

    model: str = Field(default="en_core_web_sm", min_length=1, max_length=256)
    """Name or folder of the spaCy model."""

    min_score: float = Field(default=0.5, ge=0, le=1)
    """Lowest score of a finding; less certain ones are ignored."""


class ScrubConfig(Config):
    """Removal of personal data and secrets from prompts, completions and feedback.

    Scrubbing applies to what is stored, never to what is served. It is off without a rule.
    """

    rules: tuple[ScrubRule, ...] = ()
    """What to look for. Where findings overlap, the actions of all of them apply."""

    presidio: PresidioConfig = Field(default_factory=PresidioConfig)
    """Presidio, in addition to the rules."""

    marker: str = Field(default="[removed]", max_length=64)
    """Text that replaces a finding in comments, demonstrations and tags."""

    @property
    def is_on(self) -> bool:
        """Whether there is a rule or an entity to look for."""
        return bool(self.rules or self.presidio.entities)

    @model_validator(mode="after")
    def _rule_names_differ(self) -> Self:
        names = [rule.name for rule in self.rules]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"scrub.rules names {', '.join(repeated)} more than once")
        return self
