"""Folders that prove they are whole."""

from pathlib import Path

import pytest

from onlinerl.errors import WeightsError
from onlinerl.registry.checkpoint import verify_checkpoint, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    (path / "adapter").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "adapter" / "adapter.safetensors").write_bytes(b"adapter")
    write_manifest(path, policy="assistant", cycle="c1", parent_version=3)
    return path


def test_a_whole_folder_is_verified(folder: Path) -> None:
    manifest = verify_checkpoint(folder)

    assert (manifest.policy, manifest.cycle, manifest.parent_version) == ("assistant", "c1", 3)
    assert set(manifest.files) == {"model.safetensors", "adapter/adapter.safetensors"}


def test_a_changed_a_missing_and_an_extra_file_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(WeightsError, match=r"model.safetensors: sha256"):
        verify_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model.safetensors: sha256 is missing"):
        verify_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "more.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"more.bin: .* says nothing"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("content", [None, "{", '{"policy": "assistant"}'])
def test_a_folder_without_a_manifest_is_refused(folder: Path, content: str | None) -> None:
    (folder / "checkpoint.json").unlink()
    if content is not None:
        (folder / "checkpoint.json").write_text(content)

    with pytest.raises(WeightsError, match="no valid"):
        verify_checkpoint(folder)
