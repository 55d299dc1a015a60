import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onlinerl.deploy.weights.delta import (
    HostTensor,
    read_manifest,
    version_folder,
    write_anchor,
    write_delta,
)
from onlinerl.errors import WeightsError
from onlinerl.serving.vllm_plugin import weight_stage as weight_stage_module
from onlinerl.serving.vllm_plugin.weight_stage import StagedVersion, StageRequest, WeightStage
from tests.deploy.builders import equal, nudged, weights

V1 = weights()
V2 = nudged(V1, seed=2)
V3 = nudged(V2, seed=3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_anchor(tmp_path, policy="assistant", version=1, weights=V1)
    for version, new, old in ((2, V2, V1), (3, V3, V2)):
        write_delta(
            tmp_path,
            policy="assistant",
            version=version,
            weights=new,
            parent_version=version - 1,
            parent=old,
        )
    return tmp_path


def finished(stage: WeightStage) -> dict[str, object]:
    for thread in threading.enumerate():
        if thread.name == "weights":
            thread.join(timeout=10)
    return stage.status()


def staged(stage: WeightStage, root: Path, version: int) -> dict[str, object]:
    stage.stage(StageRequest(root=root, version=version))
    return finished(stage)


def put(stage: WeightStage, root: Path, version: int) -> None:
    assert staged(stage, root, version)["state"] == "staged"
    stage.apply(version, lambda _: None)
    stage.settle()


def refusing(error: Exception) -> Callable[[StagedVersion], None]:
    def load(_: StagedVersion) -> None:
        raise error

    return load


def current(stage: WeightStage) -> dict[str, HostTensor]:
    return dict(stage.weights)


def test_versions_go_in_one_after_the_other_and_back(root: Path) -> None:
    stage = WeightStage(V1)
    for version, expected in ((1, V1), (2, V2), (3, V3), (1, V1), (3, V3)):
        put(stage, root, version)

        assert stage.version == version
        assert equal(current(stage), expected)


def test_only_the_delta_is_read_when_its_base_is_here(root: Path) -> None:
    stage = WeightStage(V1)
    put(stage, root, 1)

    found = staged(stage, root, 2)

    assert found["num_bytes"] == read_manifest(root, 2).num_bytes


def test_the_start_checkpoint_has_no_version_until_it_is_seeded(root: Path) -> None:
    stage = WeightStage(V1)

    assert stage.version is None
    # The same bits as version 1: staged in full, but nothing has to be loaded.
    assert staged(stage, root, 1)["num_changed_tensors"] == 0


def test_staging_changes_nothing_that_serves(root: Path) -> None:
    stage = WeightStage(V1, version=1)
    staged(stage, root, 2)

    assert stage.version == 1
    assert equal(current(stage), V1)


def test_a_corrupt_file_is_reported_and_staging_can_be_tried_again(root: Path) -> None:
    stage = WeightStage(V1, version=1)
    file = version_folder(root, 2) / "forward.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])

    found = staged(stage, root, 2)

    assert found["state"] == "failed"
    assert "damaged" in str(found["error"])
    with pytest.raises(WeightsError, match="nothing is staged"):
        stage.apply(2, lambda _: None)
    file.write_bytes(whole)
    put(stage, root, 2)
    assert equal(current(stage), V2)


@pytest.mark.parametrize("bug", [KeyError("no such tensor"), MemoryError()])
def test_version_that_met_an_unexpected_error_is_not_staged_again_and_others_are(
    root: Path, monkeypatch: pytest.MonkeyPatch, bug: Exception
) -> None:
    stage = WeightStage(V1, version=1)

    def fail(*_: Any, **__: Any) -> None:
        raise bug

    with monkeypatch.context() as broken:
        broken.setattr(weight_stage_module, "resolve", fail)
        found = staged(stage, root, 2)

    assert found["state"] == "failed"
    assert f"unexpected {type(bug).__name__}" in str(found["error"])
    with pytest.raises(WeightsError, match="restart the engine"):
        stage.stage(StageRequest(root=root, version=2))
    put(stage, root, 3)
    assert equal(current(stage), V3)


def test_a_version_that_was_staged_before_is_not_applied_for_another(root: Path) -> None:
    stage = WeightStage(V1, version=1)
    staged(stage, root, 2)

    with pytest.raises(WeightsError, match="version 3 is to be applied but version 2 is staged"):
        stage.apply(3, lambda _: None)
    assert stage.version == 1


def test_a_load_that_fails_leaves_version_and_weights(root: Path) -> None:
    stage = WeightStage(V1, version=1)
    staged(stage, root, 2)

    with pytest.raises(ZeroDivisionError):
        stage.apply(2, refusing(ZeroDivisionError()))

    assert stage.version == 1
    assert stage.undo() is None
    assert equal(current(stage), V1)


def test_an_applied_version_can_be_taken_back_until_it_is_settled(root: Path) -> None:
    stage = WeightStage(V1, version=1)
    staged(stage, root, 2)
    stage.apply(2, lambda _: None)
    assert stage.status()["settled"] is False
    undo = stage.undo()
    assert undo is not None
    assert equal(dict(undo), V1)

    stage.revert()

    assert (stage.version, stage.status()["settled"]) == (1, True)
    put(stage, root, 2)
    assert stage.undo() is None


def test_nothing_is_staged_over_an_unsettled_version(root: Path) -> None:
    stage = WeightStage(V1, version=1)
    staged(stage, root, 2)
    stage.apply(2, lambda _: None)

    with pytest.raises(WeightsError, match="not settled"):
        stage.stage(StageRequest(root=root, version=3))


def test_the_checksum_is_that_of_the_manifest(root: Path) -> None:
    stage = WeightStage(V1)
    put(stage, root, 2)
    assert stage.status()["digest"] is None

    stage.start_checksum()

    assert finished(stage)["digest"] == read_manifest(root, 2).digest()


def test_a_checksum_finds_a_flipped_bit(root: Path) -> None:
    stage = WeightStage(
        {name: HostTensor(t.dtype, t.shape, t.bits.copy()) for name, t in V1.items()}
    )
    stage.weights["model.norm.weight"].bits[3] ^= 1

    stage.start_checksum()

    assert finished(stage)["digest"] != read_manifest(root, 1).digest()


def test_other_tensor_names_are_loaded_as_a_whole(root: Path) -> None:
    stage = WeightStage({"lm_head.weight": V1["model.norm.weight"]})

    assert staged(stage, root, 2)["num_changed_tensors"] == len(V2)
