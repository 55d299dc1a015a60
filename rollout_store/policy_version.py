"""The name of one version of a policy: `assistant/12` in spans, headers and tags."""

import functools
import re
from dataclasses import dataclass
from typing import Self

# 19 digits: more do not fit the 64-bit integers of the tables.
_PATTERN = re.compile(r"(?P<policy>.+)/(?P<number>[1-9][0-9]{0,18})", re.DOTALL)
_MAX_NUMBER = 2**63 - 1


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """One version of a policy; `str` gives the form that is logged.

    Args:
        policy: Name of the policy.
        number: Number of the version in the registry, from 1 on.
    """

    policy: str
    number: int

    def __str__(self) -> str:
        return f"{self.policy}/{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The version that `text` names; `str` gives exactly `text` back.

        Raises:
            ValueError: `text` is not `POLICY/NUMBER`, with a number from 1 on, below 2**63 and
                without leading zeros.
        """
        version = cls._parse(text)
        if version is None:
            raise ValueError(f"{text!r} is not a policy version such as 'assistant/12'")
        return version

    @classmethod
    def find(cls, text: str, *, policy: str) -> Self | None:
        """The version of `policy` that `text` names, or None when it names no such version."""
        version = cls._parse(text)
        return version if version is not None and version.policy == policy else None

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def _parse(cls, text: str) -> Self | None:
        """Cached, because every row that ingest stores names one of a few versions."""
        match = _PATTERN.fullmatch(text)
        if match is None or int(match["number"]) > _MAX_NUMBER:
            return None
        return cls(match["policy"], int(match["number"]))
