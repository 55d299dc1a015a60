"""Local copies of registered checkpoints, verified, and the base model as version 1's."""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from onlinerl.deploy.registry.protocol import Registry
from onlinerl.errors import ConfigError, WeightsError
from onlinerl.trainer.registry.checkpoint import (
    MANIFEST,
    CheckpointManifest,
    replaced_folder,
    verify_checkpoint,
)

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


class Checkpoints:
    """A cache by version: a folder that exists was downloaded whole and has the right checksums.

    Args:
        folder: Where the copies are; of one policy.
        registry: Where they come from.
    """

    def __init__(self, folder: Path, registry: Registry) -> None:
        self._folder = folder
        self._registry = registry

    def get(self, version: int) -> Path:
        """The folder of a version, downloaded at first use.

        Raises:
            WeightsError: when a file is missing or has another checksum than `checkpoint.json`.
            ServiceUnavailable: when the registry is away.
        """
        target = self._folder / self.name(version)
        if not target.is_dir():
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            self._registry.download(version, partial)
            verify_checkpoint(partial)
            partial.rename(target)
        return target

    def name(self, version: int) -> str:
        """Number and origin, so that nothing kept under it is taken for another registry's version.

        Raises:
            WeightsError: when there is no such version.
            ServiceUnavailable: when the registry is away.
        """
        found = self._registry.version(version)
        if found is None:
            raise WeightsError(f"the registry has no version {version}")
        return f"v{version:06d}-{hashlib.sha256(found.origin.encode()).hexdigest()[:8]}"

    def keep_only(self, versions: Iterable[int]) -> None:
        """Drop the copies of all other versions: they can be downloaded again."""
        wanted = {self.name(version) for version in versions}
        for folder in self._folder.glob("v*"):
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)


def base_checkpoint(base_model: str, *, policy: str, target: Path) -> Path:
    """Copy the base model's files into a checkpoint folder that proves itself.

    Raises:
        ConfigError: when the model is neither a folder nor in the local Hugging Face cache.
        WeightsError: when it has no safetensors files.
    """
    source = _model_folder(base_model)
    if not list(source.glob("*.safetensors")):
        raise WeightsError(f"{source} holds no *.safetensors file")
    with replaced_folder(target) as folder:
        for pattern in _PATTERNS:
            for file in source.glob(pattern):
                if file.name != MANIFEST:
                    shutil.copyfile(file, folder / file.name)
        manifest = CheckpointManifest(policy=policy, files=_sha256s(folder))
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    verify_checkpoint(target)
    return target


def _sha256s(folder: Path) -> dict[str, str]:
    sums = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            sums[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return sums


def _model_folder(base_model: str) -> Path:
    if Path(base_model).is_dir():
        return Path(base_model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(base_model, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"policy.base_model {base_model!r} is neither a folder nor in the Hugging Face cache:"
            " download it first"
        ) from error
