"""What the controller asks of the model registry, and an in-memory twin for tests."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from onlinerl.errors import WeightsError

CHAMPION, CANDIDATE = "champion", "candidate"

VERDICT = "verdict"
"""promoted, refused or failed; set once the controller has decided."""
REVIEW = "review"
"""pending; approved or rejected by a person; `not needed` when the gates were enough."""
NOT_NEEDED = "not needed"
PARENT = "parent_version"
"""The version that a candidate was trained from."""
ROLLED_BACK = "rolled_back"
"""Why a version that served was taken back; empty once it serves again."""
PROMOTED_FROM = "promoted_from"
"""The champion before this version."""
PROMOTE_REQUEST, PROMOTE_RESULT = "promote.request", "promote.result"
"""JSON of a `Request` on a version, and of its `Answer`."""
PROMOTED_BY = "promoted_by"
"""The request that made a version champion, so that a crash before its answer is made up for."""
ROLLBACK_REQUEST, ROLLBACK_RESULT = "rollback.request", "rollback.result"
"""The same on the registered model."""


@dataclass(frozen=True)
class PolicyVersion:
    """A version of the registered model."""

    number: int
    tags: Mapping[str, str]
    description: str = ""
    origin: str = ""
    """Where its weights come from. Numbers begin anew in another registry, origins do not."""

    @property
    def verdict(self) -> str | None:
        """promoted, refused, failed, or None while nothing was decided."""
        return self.tags.get(VERDICT)


class Registry(Protocol):
    """Versions of one policy. Every call may raise ServiceUnavailable."""

    def check(self) -> None:
        """Raise ServiceUnavailable when the registry does not answer in time."""
        ...

    def versions(self) -> Sequence[PolicyVersion]:
        """All versions, oldest first."""
        ...

    def version(self, number: int) -> PolicyVersion | None:
        """One version."""
        ...

    def alias(self, name: str) -> int | None:
        """Where an alias points."""
        ...

    def set_alias(self, name: str, version: int) -> None:
        """Move an alias."""
        ...

    def set_tags(self, version: int, tags: Mapping[str, str]) -> None:
        """Add or replace tags of a version."""
        ...

    def describe(self, version: int, description: str) -> None:
        """Replace the description, which is shown as Markdown."""
        ...

    def model_tags(self) -> Mapping[str, str]:
        """Tags of the registered model as a whole; empty when there is none yet."""
        ...

    def set_model_tag(self, key: str, value: str) -> None:
        """Add or replace one of them."""
        ...

    def download(self, version: int, target: Path) -> None:
        """Copy the checkpoint of a version to `target`, which does not exist; not verified.

        Raises:
            WeightsError: when the registry answers and does not have it any more.
        """
        ...

    def register_base(self, checkpoint: Path) -> int:
        """Make version 1 of a checkpoint folder, creating the registered model."""
        ...

    def log_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the run that made the version."""
        ...


@dataclass
class MemoryRegistry:
    """A Registry in dictionaries."""

    folders: dict[int, Path] = field(default_factory=dict)
    tags: dict[int, dict[str, str]] = field(default_factory=dict)
    descriptions: dict[int, str] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    of_model: dict[str, str] = field(default_factory=dict)

    def add(self, checkpoint: Path, *, candidate: bool = True, **tags: str) -> int:
        """Register a version as a trainer would."""
        number = max(self.folders, default=0) + 1
        self.folders[number] = checkpoint
        self.tags[number] = {REVIEW: "pending"} | tags
        if candidate:
            self.aliases[CANDIDATE] = number
        return number

    def check(self) -> None:
        """Always there."""

    def versions(self) -> Sequence[PolicyVersion]:
        """As the real one."""
        return [self._version(number) for number in sorted(self.folders)]

    def version(self, number: int) -> PolicyVersion | None:
        """As the real one."""
        return self._version(number) if number in self.folders else None

    def _version(self, number: int) -> PolicyVersion:
        return PolicyVersion(
            number,
            dict(self.tags.get(number, {})),
            self.descriptions.get(number, ""),
            str(self.folders[number]),
        )

    def alias(self, name: str) -> int | None:
        """As the real one."""
        return self.aliases.get(name)

    def set_alias(self, name: str, version: int) -> None:
        """As the real one."""
        self.aliases[name] = version

    def set_tags(self, version: int, tags: Mapping[str, str]) -> None:
        """As the real one."""
        self.tags.setdefault(version, {}).update(tags)

    def describe(self, version: int, description: str) -> None:
        """As the real one."""
        self.descriptions[version] = description

    def model_tags(self) -> Mapping[str, str]:
        """As the real one."""
        return dict(self.of_model)

    def set_model_tag(self, key: str, value: str) -> None:
        """As the real one."""
        self.of_model[key] = value

    def download(self, version: int, target: Path) -> None:
        """Copy the folder."""
        if not self.folders[version].is_dir():
            raise WeightsError(f"the registry has no checkpoint of version {version}")
        shutil.copytree(self.folders[version], target)

    def register_base(self, checkpoint: Path) -> int:
        """As a trainer's version, without the alias."""
        return self.add(checkpoint, candidate=False)

    def log_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Keep them."""
        self.metrics.setdefault(version, {}).update(metrics)
