"""A version as the registry records it, and the aliases and tags that both its users read."""

from collections.abc import Mapping
from dataclasses import dataclass

CHAMPION, CANDIDATE = "champion", "candidate"
"""Aliases: the version that serves, and the newest version that a cycle offers."""

CYCLE = "cycle"
"""Tag: the cycle that trained the version; `bootstrap` for the base model."""
PARENT = "parent_version"
"""Tag: the number of the version that a candidate was trained from."""
REVIEW = "review"
"""Tag: `pending`; `approved` or `rejected` by a person; `not needed` when the gates were enough."""
VERDICT = "verdict"
"""Tag: `promoted`, `refused` or `failed`; absent until the deploy controller has decided."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of the registered model."""

    number: int
    tags: Mapping[str, str]
    description: str = ""
    """Markdown."""
    origin: str = ""
    """Where its weights come from. Another registry numbers from 1 again; its origins differ."""

    @property
    def verdict(self) -> str | None:
        """`promoted`, `refused` or `failed`; None until the deploy controller has decided."""
        return self.tags.get(VERDICT)
