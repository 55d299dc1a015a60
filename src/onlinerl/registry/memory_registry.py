"""The in-memory twin of the registry, for tests."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from onlinerl.errors import WeightsError
from onlinerl.registry.policy_registry import PolicyRegistry
from onlinerl.registry.version import CANDIDATE, CYCLE, REVIEW, RegisteredVersion


class MemoryRegistry(PolicyRegistry):
    """A registry in dictionaries, which tests read and change.

    Args:
        artifacts: Folder of the artifacts of each run, by run id.
    """

    def __init__(self, artifacts: Mapping[str, Path] | None = None) -> None:
        super().__init__("assistant")
        self.artifacts = {} if artifacts is None else artifacts
        self.folders: dict[int, Path] = {}
        """Checkpoint of each version."""
        self.tags: dict[int, dict[str, str]] = {}
        self.descriptions: dict[int, str] = {}
        self.metrics: dict[int, dict[str, float]] = {}
        self.aliases: dict[str, int] = {}
        self.of_model: dict[str, str] = {}
        """Tags of the registered model."""

    def add(self, checkpoint: Path, *, candidate: bool = True, **tags: str) -> int:
        """Register a version as a trainer would."""
        number = max(self.folders, default=0) + 1
        self.folders[number] = checkpoint
        self.tags[number] = {REVIEW: "pending"} | tags
        if candidate:
            self.aliases[CANDIDATE] = number
        return number

    @override
    def check(self) -> None:
        pass

    @override
    def versions(self) -> Sequence[RegisteredVersion]:
        return [self._record(number) for number in sorted(self.folders)]

    @override
    def version(self, number: int) -> RegisteredVersion | None:
        return self._record(number) if number in self.folders else None

    @override
    def version_of(self, cycle_id: str) -> int | None:
        numbers = [number for number, tags in self.tags.items() if tags.get(CYCLE) == cycle_id]
        return max(numbers, default=None)

    @override
    def alias(self, name: str) -> int | None:
        return self.aliases.get(name)

    @override
    def set_alias(self, name: str, version: int) -> None:
        self.aliases[name] = version

    @override
    def set_tags(self, version: int, tags: Mapping[str, str]) -> None:
        self.tags.setdefault(version, {}).update(tags)

    @override
    def describe(self, version: int, description: str) -> None:
        self.descriptions[version] = description

    @override
    def model_tags(self) -> Mapping[str, str]:
        return dict(self.of_model)

    @override
    def set_model_tag(self, key: str, value: str) -> None:
        self.of_model[key] = value

    @override
    def download(self, version: int, target: Path) -> None:
        if version not in self.folders or not self.folders[version].is_dir():
            raise WeightsError(f"the registry has no checkpoint of version {version}")
        shutil.copytree(self.folders[version], target, dirs_exist_ok=True)

    @override
    def register_base(self, checkpoint: Path) -> int:
        return self.add(checkpoint, candidate=False)

    @override
    def create_version(
        self, *, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str
    ) -> int:
        number = max(self.folders, default=0) + 1
        self.folders[number] = self.artifacts[run_id] / artifact_path
        self.tags[number] = dict(tags)
        self.descriptions[number] = description
        return number

    @override
    def log_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        self.metrics.setdefault(version, {}).update(metrics)

    def _record(self, number: int) -> RegisteredVersion:
        return RegisteredVersion(
            number,
            dict(self.tags.get(number, {})),
            self.descriptions.get(number, ""),
            str(self.folders[number]),
        )
