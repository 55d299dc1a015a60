"""The format of a checkpoint: a folder of weights whose `checkpoint.json` has every file's sha256.

Write one inside `onlinerl.process.files.replaced_folder`, so that its name exists only once it is
complete.
"""

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from onlinerl.errors import WeightsError

MANIFEST = "checkpoint.json"


class CheckpointManifest(BaseModel):
    """Content of `checkpoint.json`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    policy: str
    cycle: str | None = None
    """None for the base model, which no cycle trained."""
    parent_version: int | None = None
    """None for the base model."""
    files: dict[str, str]
    """sha256, hexadecimal, by path below the folder."""


def write_manifest(
    folder: Path, *, policy: str, cycle: str | None = None, parent_version: int | None = None
) -> CheckpointManifest:
    """Hash every file of the folder and write its `checkpoint.json`.

    Args:
        folder: A folder with all its files; a manifest in it is replaced.
        policy: Name of the policy.
        cycle: The cycle that trained the weights; None for the base model.
        parent_version: The version that they were trained from; None for the base model.
    """
    manifest = CheckpointManifest(
        policy=policy, cycle=cycle, parent_version=parent_version, files=file_hashes(folder)
    )
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return manifest


def verify_checkpoint(folder: Path) -> CheckpointManifest:
    """Check that the folder holds exactly the files of its manifest, with their hashes.

    Raises:
        WeightsError: the manifest is missing or invalid, or a file is missing, not in the manifest
            or has another hash; the message names the first such file.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = CheckpointManifest.model_validate_json(text)
    except (FileNotFoundError, ValidationError) as error:
        raise WeightsError(f"{folder} has no valid {MANIFEST}: {error}") from error
    hashes = file_hashes(folder)
    for name in sorted(manifest.files.keys() | hashes.keys()):
        if manifest.files.get(name) != hashes.get(name):
            raise WeightsError(
                f"{folder / name}: sha256 is {hashes.get(name, 'missing')}, "
                f"{MANIFEST} says {manifest.files.get(name, 'nothing')}"
            )
    return manifest


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256, hexadecimal, of every file below the folder but its manifest, by relative path."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): _sha256(file)
        for file in files
        if file != folder / MANIFEST
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
