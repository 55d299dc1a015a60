"""Weights of registered versions on the local disk: downloaded once, verified every time."""

import shutil
from pathlib import Path

from onlinerl.errors import WeightsError
from onlinerl.trainer.registry.checkpoint import replaced_folder, verify_checkpoint
from onlinerl.trainer.registry.protocol import ModelRegistry

KEPT_VERSIONS = 2


def fetch_version(registry: ModelRegistry, *, version: int, cache: Path) -> Path:
    """The checkpoint folder of a version; older ones leave the cache.

    Raises:
        WeightsError: when the registry's copy does not have the hashes its manifest names.
    """
    folder = cache / f"v{version:06d}"
    if not _is_whole(folder):
        with replaced_folder(folder) as staging:
            staging.rmdir()
            registry.download(version, staging)
            verify_checkpoint(staging)
    for old in sorted(cache.glob("v" + "[0-9]" * 6))[:-KEPT_VERSIONS]:
        if old != folder:
            shutil.rmtree(old)
    return folder


def _is_whole(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        verify_checkpoint(folder)
    except WeightsError:
        return False
    return True
