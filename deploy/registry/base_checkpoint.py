"""The base model as a checkpoint: what is registered as version 1."""

import shutil
from pathlib import Path

from onlinerl.errors import ConfigError, WeightsError
from onlinerl.process.files import replaced_folder
from onlinerl.registry.checkpoint import MANIFEST, verify_checkpoint, write_manifest

_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def base_checkpoint(base_model: str, *, policy: str, target: Path) -> Path:
    """Copy the base model's files into a checkpoint folder with a manifest.

    Args:
        base_model: A local folder, or the name of a model in the local Hugging Face cache.
        policy: Name of the policy.
        target: The checkpoint folder; an older one is replaced.

    Raises:
        ConfigError: the model is neither a folder nor in the local Hugging Face cache.
        WeightsError: the model has no safetensors files.
    """
    source = _model_folder(base_model)
    if not list(source.glob("*.safetensors")):
        raise WeightsError(f"{source} holds no *.safetensors file")
    with replaced_folder(target) as folder:
        for pattern in _PATTERNS:
            for file in source.glob(pattern):
                if file.name != MANIFEST:
                    shutil.copyfile(file, folder / file.name)
        write_manifest(folder, policy=policy)
    verify_checkpoint(target)
    return target


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
