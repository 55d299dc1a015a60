"""Checkpoints of registered versions on the local disk: downloaded once, verified, then shared."""

import hashlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from onlinerl.errors import WeightsError
from onlinerl.process.files import replaced_folder
from onlinerl.registry.checkpoint import verify_checkpoint
from onlinerl.registry.version import RegisteredVersion

_COMPLETE = re.compile(r"v[0-9]{6,}-[0-9a-f]{8}")


class CheckpointSource(Protocol):
    """The part of a registry that the cache downloads from."""

    def version(self, number: int) -> RegisteredVersion | None:
        """One version; None when the registry has no such number.

        Raises:
            ServiceUnavailable: the registry does not answer.
        """
        ...

    def download(self, version: int, target: Path) -> None:
        """Copy the checkpoint of a version into `target`, a folder that is empty or missing.

        The files are not verified.

        Raises:
            WeightsError: the registry answers, and has no such checkpoint.
            ServiceUnavailable: the registry does not answer.
        """
        ...


class CheckpointCache:
    """Local copies of the checkpoints of one registry; a folder that exists is complete.

    A copy is named by its version's number and origin, so that a copy of one policy or registry
    never passes for the version of the same number of another. One process at a time.

    Args:
        folder: Where the copies are.
        registry: Where they come from.
    """

    def __init__(self, folder: Path, registry: CheckpointSource) -> None:
        self._folder = folder
        self._registry = registry

    def get(self, version: int, *, verify_again: bool = False) -> Path:
        """The folder of a version, downloaded and verified at its first use.

        Args:
            version: Number of the version.
            verify_again: Whether to hash an older copy again, and to replace it when it is damaged.

        Raises:
            WeightsError: there is no such version, or the registry's copy does not match its
                manifest.
            ServiceUnavailable: the registry does not answer.
        """
        target = self._folder / self.name(version)
        if not target.is_dir() or (verify_again and not _is_intact(target)):
            with replaced_folder(target) as staging:
                self._registry.download(version, staging)
                verify_checkpoint(staging)
        return target

    def name(self, version: int) -> str:
        """Name of the folder of a version: its number and a hash of its origin.

        Raises:
            WeightsError: there is no such version.
            ServiceUnavailable: the registry does not answer.
        """
        record = self._registry.version(version)
        if record is None:
            raise WeightsError(f"the registry has no version {version}")
        return f"v{version:06d}-{hashlib.sha256(record.origin.encode()).hexdigest()[:8]}"

    def keep_only(self, versions: Iterable[int]) -> None:
        """Remove the copies of all other versions; they can be downloaded again.

        Raises:
            WeightsError: there is no such version.
            ServiceUnavailable: the registry does not answer.
        """
        self._remove_all_but({self.name(version) for version in versions})

    def keep_newest(self, count: int, *, besides: Path) -> None:
        """Remove all copies but those with the `count` highest numbers, and `besides`."""
        copies = sorted(each.name for each in self._folder.glob("v*") if _is_complete(each))
        self._remove_all_but({*copies[-count:], besides.name})

    def _remove_all_but(self, names: set[str]) -> None:
        for folder in self._folder.glob("v*"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    """Whether it is a copy, and not what a killed download left."""
    return _COMPLETE.fullmatch(folder.name) is not None


def _is_intact(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except WeightsError:
        return False
    return True
