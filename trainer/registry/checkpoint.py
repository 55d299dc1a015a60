"""A folder of weights that proves it is whole: `checkpoint.json` with a sha256 of every file.

Folders are written under another name, synced and renamed, so a name that exists is complete.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from onlinerl.errors import WeightsError

MANIFEST = "checkpoint.json"


class CheckpointManifest(BaseModel):
    """Content of `checkpoint.json`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    policy: str
    cycle: str | None = None
    """None for version 1, which no cycle made."""
    parent_version: int | None = None
    files: dict[str, str]
    """sha256, hexadecimal, by path below the folder."""


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` when the block ends well, and never existed if not."""
    staging = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    yield staging
    for file in staging.rglob("*"):
        _sync(file)
    _sync(staging)
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    _sync(target.parent)


def write_manifest(
    folder: Path, *, policy: str, cycle: str, parent_version: int
) -> CheckpointManifest:
    """Hash every file of the folder into its `checkpoint.json`."""
    manifest = CheckpointManifest(
        policy=policy, cycle=cycle, parent_version=parent_version, files=_hashes(folder)
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return manifest


def verify_checkpoint(folder: Path) -> CheckpointManifest:
    """The manifest of a folder whose files are exactly those it names.

    Raises:
        WeightsError: naming the first file that is missing, extra or has another hash.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = CheckpointManifest.model_validate_json(text)
    except (FileNotFoundError, ValidationError) as error:
        raise WeightsError(f"{folder} has no valid {MANIFEST}: {error}") from error
    found = _hashes(folder)
    for name in sorted(manifest.files.keys() | found.keys()):
        if manifest.files.get(name) != found.get(name):
            raise WeightsError(
                f"{folder / name}: sha256 is {found.get(name, 'missing')}, "
                f"{MANIFEST} says {manifest.files.get(name, 'nothing')}"
            )
    return manifest


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): _sha256(file)
        for file in files
        if file != folder / MANIFEST
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
