"""What the examiner deletes, and the faults that it must not hide."""

import logging
from pathlib import Path

import pytest

from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.gates.examiner import Examiner
from onlinerl.registry.checkpoint_cache import CheckpointCache
from onlinerl.registry.memory_registry import MemoryRegistry


@pytest.fixture
def examiner(tmp_path: Path) -> Examiner:
    """An examiner whose registry has no version."""
    return Examiner(
        tmp_path / "gates",
        checkpoints=CheckpointCache(tmp_path / "checkpoints", MemoryRegistry()),
        answers=list,
        config=DeployConfig(),
    )


def test_a_spec_that_was_only_half_written_is_deleted_as_well(
    examiner: Examiner, tmp_path: Path
) -> None:
    folder = tmp_path / "gates"
    folder.mkdir()
    for name in ("v000002.spec", ".v000002.spec.tmp", "v000002.json"):
        (folder / name).touch()

    examiner.cancel()

    assert [file.name for file in folder.iterdir()] == ["v000002.json"]


def test_a_registry_that_lost_version_1_is_logged_and_stops_no_cleanup(
    examiner: Examiner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "checkpoints" / "v000007-0123abcd"
    copy.mkdir(parents=True)

    with caplog.at_level(logging.WARNING):
        examiner.keep_only([])

    assert "the registry has no version 1" in caplog.text
    assert not copy.exists()
