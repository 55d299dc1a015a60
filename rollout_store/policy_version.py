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
        parts = _parts(text)
        if parts is None:
            raise ValueError(f"{text!r} is not a policy version such as 'assistant/12'")
        return cls(*parts)

    @classmethod
    def find(cls, text: str, *, policy: str) -> Self | None:
        """The version of `policy` that `text` names, or None when it names no such version."""
        parts = _parts(text)
        return cls(*parts) if parts is not None and parts[0] == policy else None


@functools.lru_cache(maxsize=1024)
def _parts(text: str) -> tuple[str, int] | None:
    """Policy and number; cached, because ingest reads the same few versions in every row."""
    match = _PATTERN.fullmatch(text)
    if match is None or int(match["number"]) > _MAX_NUMBER:
        return None
    return match["policy"], int(match["number"])
