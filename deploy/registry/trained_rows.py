"""Which rows a version learned from: the list that its cycle left in the registry."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pyarrow import parquet

from onlinerl.deploy.registry.mlflow import MlflowRegistry
from onlinerl.deploy.registry.protocol import PARENT, PolicyVersion

ARTIFACT = "lineage/interactions.parquet"


class TrainedRows(Protocol):
    """Versions of one policy with the rows that each learned from.

    Raises:
        ServiceUnavailable: the registry does not answer.
    """

    def versions(self) -> Sequence[PolicyVersion]:
        """All versions, oldest first."""
        ...

    def rows(self, version: int) -> pa.Table | None:
        """Columns `tenant`, `interaction_id`, `choice_index` and more; None for the base model."""
        ...

    def mark(self, version: int, *, num_erased: int) -> None:
        """Note on the version that so many of its rows were erased since."""
        ...


class RegistryRows:
    """TrainedRows in MLflow."""

    def __init__(self, registry: MlflowRegistry) -> None:
        self._registry = registry

    def versions(self) -> Sequence[PolicyVersion]:
        """By search."""
        return self._registry.versions()

    def rows(self, version: int) -> pa.Table | None:
        """The artifact of the version's run."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "interactions.parquet"
            found = self._registry.download_from_run(version, ARTIFACT, file)
            return parquet.read_table(file) if found else None

    def mark(self, version: int, *, num_erased: int) -> None:
        """As the tag `erased_rows`."""
        self._registry.set_tags(version, {"erased_rows": str(num_erased)})


@dataclass
class MemoryRows:
    """TrainedRows in a dictionary."""

    tables: dict[int, pa.Table | None] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)

    def versions(self) -> Sequence[PolicyVersion]:
        """Of the keys."""
        return [PolicyVersion(number, self._tags(number)) for number in sorted(self.tables)]

    def rows(self, version: int) -> pa.Table | None:
        """As it was given."""
        return self.tables[version]

    def mark(self, version: int, *, num_erased: int) -> None:
        """Remember it."""
        self.marks[version] = num_erased

    def _tags(self, number: int) -> dict[str, str]:
        return {PARENT: str(self.parents[number])} if number in self.parents else {}


def heirs(versions: Sequence[PolicyVersion], trained: Sequence[int]) -> list[int]:
    """Versions that were trained from one of these, directly or through others."""
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


def _parent(version: PolicyVersion) -> int | None:
    parent = version.tags.get(PARENT, "")
    return int(parent) if parent.isdigit() else None
