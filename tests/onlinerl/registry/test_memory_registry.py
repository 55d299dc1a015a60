"""The twin, as the trainer and as the deploy controller see it."""

from pathlib import Path

import pytest

from onlinerl.deploy.registry.protocol import Registry
from onlinerl.errors import ServiceUnavailable, WeightsError
from onlinerl.registry.memory_registry import MemoryRegistry
from onlinerl.trainer.registry.protocol import ModelRegistry


def test_a_candidate_of_the_trainer_is_seen_and_judged_by_the_controller(tmp_path: Path) -> None:
    twin = MemoryRegistry({"run": tmp_path})
    trainer: ModelRegistry = twin
    controller: Registry = twin

    number = trainer.create_version(
        run_id="run", artifact_path="checkpoint", tags={"cycle": "c1"}, description="text"
    )
    trainer.set_candidate(number)

    assert trainer.version_of("c1") == controller.alias("candidate") == trainer.undecided() == 1
    assert trainer.version_of("c2") is None
    (record,) = controller.versions()
    assert (record.description, record.verdict) == ("text", None)
    assert record.origin == str(tmp_path / "checkpoint")

    controller.set_tags(1, {"verdict": "promoted"})
    controller.set_alias("champion", 1)
    assert trainer.is_decided(1)
    assert trainer.undecided() is None
    assert trainer.champion() == 1


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    twin = MemoryRegistry()

    with pytest.raises(ServiceUnavailable, match="has no champion yet"):
        twin.champion()
    with pytest.raises(WeightsError, match="no version 4"):
        twin.is_decided(4)
    with pytest.raises(WeightsError, match="no checkpoint of version 4"):
        twin.download(4, tmp_path / "copy")
