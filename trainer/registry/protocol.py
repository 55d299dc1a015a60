"""What a cycle asks of the model registry, and an in-memory twin for tests."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class ModelRegistry(Protocol):
    """Versions of one policy."""

    def check(self) -> None:
        """Raise ServiceUnavailable when the registry does not answer in time."""
        ...

    def champion(self) -> int:
        """The version that serves; raises ServiceUnavailable when there is none yet."""
        ...

    def undecided(self) -> int | None:
        """The candidate that has no verdict yet."""
        ...

    def is_decided(self, version: int) -> bool:
        """Whether the deploy controller has given its verdict."""
        ...

    def download(self, version: int, target: Path) -> None:
        """Copy the checkpoint of a version to `target`, which does not exist yet."""
        ...

    def version_of(self, cycle_id: str) -> int | None:
        """The version that a cycle registered, if it came that far."""
        ...

    def create_version(
        self, *, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str
    ) -> int:
        """Register an artifact folder of a run with all its tags at once."""
        ...

    def set_candidate(self, version: int) -> None:
        """Offer the version to the deploy controller."""
        ...


@dataclass
class MemoryVersion:
    """A version of the twin."""

    folder: Path
    tags: dict[str, str]
    description: str = ""


@dataclass
class MemoryRegistry:
    """A ModelRegistry in a dictionary. `artifacts` maps a run id to its folder."""

    versions: dict[int, MemoryVersion] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)

    def check(self) -> None:
        """Always there."""

    def champion(self) -> int:
        """KeyError when unset: tests set it."""
        return self.aliases["champion"]

    def undecided(self) -> int | None:
        """As the real one."""
        version = self.aliases.get("candidate")
        return None if version is None or self.is_decided(version) else version

    def is_decided(self, version: int) -> bool:
        """By the tag `verdict`."""
        return "verdict" in self.versions[version].tags

    def download(self, version: int, target: Path) -> None:
        """Copy the folder."""
        shutil.copytree(self.versions[version].folder, target)

    def version_of(self, cycle_id: str) -> int | None:
        """As the real one."""
        found = [n for n, version in self.versions.items() if version.tags.get("cycle") == cycle_id]
        return max(found, default=None)

    def create_version(
        self, *, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str
    ) -> int:
        """The next number."""
        number = max(self.versions, default=0) + 1
        folder = self.artifacts[run_id] / artifact_path
        self.versions[number] = MemoryVersion(folder, dict(tags), description)
        return number

    def set_candidate(self, version: int) -> None:
        """Move the alias."""
        self.aliases["candidate"] = version
