"""Which rows a version learned from: the list that its cycle left in the registry."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pyarrow import parquet
from typing_extensions import override

from onlinerl.registry.mlflow_registry import MlflowRegistry
from onlinerl.registry.version import PARENT, RegisteredVersion

ARTIFACT = "lineage/interactions.parquet"


class TrainedRows(Protocol):
    """Versions of one policy with the rows that each learned from.

    Raises:
        ServiceUnavailable: the registry does not answer.
    """

    def versions(self) -> Sequence[RegisteredVersion]:
        """All versions, oldest first."""
        ...

    def rows(self, version: int) -> pa.Table | None:
        """Columns `tenant`, `interaction_id`, `choice_index` and more; None for the base model."""
        ...

    def mark(self, version: int, *, num_erased: int) -> None:
        """Note on a version that this number of its rows has been erased since."""
        ...


class RegistryRows(TrainedRows):
    """TrainedRows in MLflow: an artifact of the version's run, and the tag `erased_rows`."""

    def __init__(self, registry: MlflowRegistry) -> None:
        self._registry = registry

    @override
    def versions(self) -> Sequence[RegisteredVersion]:
        return self._registry.versions()

    @override
    def rows(self, version: int) -> pa.Table | None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "interactions.parquet"
            found = self._registry.download_from_run(version, ARTIFACT, file)
            return parquet.read_table(file) if found else None

    @override
    def mark(self, version: int, *, num_erased: int) -> None:
        self._registry.set_tags(version, {"erased_rows": str(num_erased)})


@dataclass
class MemoryRows(TrainedRows):
    """TrainedRows in a dictionary, for tests."""

    tables: dict[int, pa.Table | None] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)

    @override
    def versions(self) -> Sequence[RegisteredVersion]:
        return [RegisteredVersion(number, self._tags(number)) for number in sorted(self.tables)]

    @override
    def rows(self, version: int) -> pa.Table | None:
        return self.tables[version]

    @override
    def mark(self, version: int, *, num_erased: int) -> None:
        self.marks[version] = num_erased

    def _tags(self, number: int) -> dict[str, str]:
        return {PARENT: str(self.parents[number])} if number in self.parents else {}


def descendants(versions: Sequence[RegisteredVersion], trained: Sequence[int]) -> list[int]:
    """Versions that were trained from one of `trained`, directly or through others."""
    reached = set(trained)
    grew = True
    while grew:
        more = {
            each.number
            for each in versions
            if each.number not in reached and _parent(each) in reached
        }
        reached |= more
        grew = bool(more)
    return sorted(reached - set(trained))


def _parent(version: RegisteredVersion) -> int | None:
    parent = version.tags.get(PARENT, "")
    return int(parent) if parent.isdigit() else None
