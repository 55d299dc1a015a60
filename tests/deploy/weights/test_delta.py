import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onlinerl.deploy.weights.delta import (
    HostTensor,
    is_published,
    plan,
    read_checkpoint,
    read_manifest,
    resolve,
    version_folder,
    write_anchor,
    write_delta,
)
from onlinerl.errors import WeightsError
from tests.deploy.builders import equal, nudged, weights, write_safetensors

V1 = weights()
V2 = nudged(V1, seed=2)
V3 = nudged(V2, seed=3)
V4 = nudged(V2, seed=4)  # a branch: 4 descends from 2, not from 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """1 (anchor) <- 2 <- 3, and 2 <- 4."""
    write_anchor(tmp_path, policy="assistant", version=1, weights=V1)
    delta(tmp_path, 2, V2, 1, V1)
    delta(tmp_path, 3, V3, 2, V2)
    delta(tmp_path, 4, V4, 2, V2)
    return tmp_path


def delta(
    root: Path,
    version: int,
    tensors: dict[str, HostTensor],
    parent_version: int,
    parent: dict[str, HostTensor],
) -> None:
    write_delta(
        root,
        policy="assistant",
        version=version,
        weights=tensors,
        parent_version=parent_version,
        parent=parent,
    )


def steps(root: Path, target: int, current: int | None) -> list[tuple[int, str]]:
    return [
        (step.manifest.version, step.direction)
        for step in plan(root, target=target, current=current)
    ]


def test_a_checkpoint_reads_as_the_bits_that_were_written(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", V1)

    assert equal(read_checkpoint(tmp_path), V1)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"{]"], ids=["empty", "short", "no JSON"]
)
def test_a_damaged_checkpoint_raises_weights_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(WeightsError):
        read_checkpoint(tmp_path)


def test_paths_are_contiguous_and_as_short_as_the_tree_allows(root: Path) -> None:
    assert steps(root, 3, None) == [(1, "forward"), (2, "forward"), (3, "forward")]
    assert steps(root, 3, 2) == [(3, "forward")]
    assert steps(root, 1, 3) == [(3, "inverse"), (2, "inverse")]
    assert steps(root, 4, 3) == [(3, "inverse"), (4, "forward")]
    assert steps(root, 3, 3) == []


@pytest.mark.parametrize("current", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("target", [1, 2, 3, 4])
def test_every_version_is_reached_bit_for_bit_from_every_other(
    root: Path, target: int, current: int | None
) -> None:
    all_weights = {1: V1, 2: V2, 3: V3, 4: V4}
    base = None if current is None else all_weights[current]

    assert equal(resolve(root, target=target, current=current, base=base), all_weights[target])


@given(path=st.lists(st.integers(1, 4), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_any_walk_through_the_versions_ends_on_the_right_bits(
    tmp_path_factory: pytest.TempPathFactory, path: list[int]
) -> None:
    root = tmp_path_factory.mktemp("walk")
    write_anchor(root, policy="assistant", version=1, weights=V1)
    delta(root, 2, V2, 1, V1)
    delta(root, 3, V3, 2, V2)
    delta(root, 4, V4, 2, V2)
    at, here = 1, V1

    for target in path:
        here = resolve(root, target=target, current=at, base=here)
        at = target

    assert equal(here, {1: V1, 2: V2, 3: V3, 4: V4}[at])


def test_a_gap_leads_to_an_anchor_and_never_to_a_replay(root: Path) -> None:
    write_anchor(root, policy="assistant", version=5, weights=V3)
    delta(root, 6, V4, 5, V3)
    shutil.rmtree(version_folder(root, 2))

    assert steps(root, 6, 3) == [(5, "forward"), (6, "forward")]
    with pytest.raises(WeightsError, match=r"needs version 2.*nearest anchor is version 5"):
        resolve(root, target=4)


def test_an_unknown_current_version_leads_to_an_anchor(root: Path) -> None:
    assert steps(root, 2, 99) == [(1, "forward"), (2, "forward")]


def test_a_delta_on_the_wrong_base_is_refused_and_leaves_the_base_alone(root: Path) -> None:
    wrong = {name: HostTensor(t.dtype, t.shape, t.bits.copy()) for name, t in V1.items()}
    wrong["model.norm.weight"].bits[0] ^= 1
    before = {name: tensor.bits.copy() for name, tensor in wrong.items()}

    with pytest.raises(WeightsError, match="checksum"):
        resolve(root, target=2, current=1, base=wrong)
    assert all((wrong[name].bits == before[name]).all() for name in before)


def test_without_ready_a_version_does_not_exist(root: Path) -> None:
    (version_folder(root, 3) / "READY").unlink()

    assert not is_published(root, 3)
    with pytest.raises(WeightsError, match="not published"):
        resolve(root, target=3)
    # And it can be published again over the remains.
    delta(root, 3, V3, 2, V2)
    assert equal(resolve(root, target=3), V3)


@pytest.mark.parametrize(
    ("file", "problem"), [("forward.bin", "is damaged"), ("manifest.json", "checksum in READY")]
)
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_file_is_found_before_it_is_used(
    root: Path, file: str, problem: str, damage: str
) -> None:
    path = version_folder(root, 3) / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0x40
    path.write_bytes(data[: -1 if damage == "cut" else None])

    with pytest.raises(WeightsError, match=problem):
        resolve(root, target=3, current=2, base=V2)


def test_publishing_again_is_a_no_op_and_other_weights_are_refused(root: Path) -> None:
    before = (version_folder(root, 3) / "manifest.json").stat().st_mtime_ns
    delta(root, 3, V3, 2, V2)

    assert (version_folder(root, 3) / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(WeightsError, match="never changes"):
        delta(root, 3, V4, 2, V2)


def test_a_manifest_counts_changes_and_bytes(root: Path) -> None:
    manifest = read_manifest(root, 2)
    changed = sum(int((V1[name].bits != V2[name].bits).sum()) for name in V1)

    assert manifest.num_changed == changed
    assert manifest.num_elements == 64 * 8 + 8
    assert manifest.full_bytes == 2 * manifest.num_elements
    assert manifest.num_bytes == (version_folder(root, 2) / "forward.bin").stat().st_size


def test_a_delta_without_changes_is_a_version(root: Path) -> None:
    delta(root, 5, V4, 4, V4)

    manifest = read_manifest(root, 5)

    assert (manifest.num_changed, manifest.num_bytes) == (0, 0)
    assert equal(resolve(root, target=5, current=4, base=V4), V4)


def test_a_delta_between_different_shapes_is_refused(root: Path) -> None:
    grown = V4 | {"model.norm.weight": HostTensor("BF16", (9,), np.zeros(9, np.uint16))}

    with pytest.raises(WeightsError, match="publish an anchor"):
        delta(root, 5, grown, 4, V4)


def test_a_manifest_of_another_version_is_refused(root: Path) -> None:
    shutil.copytree(version_folder(root, 3), version_folder(root, 7))

    with pytest.raises(WeightsError, match="describes version 3"):
        read_manifest(root, 7)


def test_a_manifest_is_plain_json(root: Path) -> None:
    found = json.loads((version_folder(root, 2) / "manifest.json").read_text())

    assert found["kind"] == "delta"
    assert found["parent_version"] == 1
