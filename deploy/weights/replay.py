"""From the version that an engine holds to the version that it should hold.

Versions form trees: an anchor is a root, a delta leads from its parent to itself, and its inverse
leads back. Every step of a path starts from exactly the weights that it was written against, and
the result is checked against the checksums of the target.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from onlinerl.deploy.weights.encodings import decode
from onlinerl.deploy.weights.manifest import (
    FORWARD,
    INVERSE,
    Manifest,
    Payload,
    TensorEntry,
    is_published,
    read_manifest,
    version_folder,
)
from onlinerl.deploy.weights.tensors import Bits, HostTensor, Weights, bits_dtype
from onlinerl.errors import WeightsError


@dataclass(frozen=True)
class Step:
    """One payload file to apply: from a version's parent to the version, or back."""

    manifest: Manifest
    """The version whose file it is."""
    direction: Literal["forward", "inverse"]
    """`forward` leads to the version, `inverse` from it back to its parent."""

    @property
    def file(self) -> str:
        """Name of the payload file."""
        return FORWARD if self.direction == "forward" else INVERSE

    @property
    def num_bytes(self) -> int:
        """Size of the payload file."""
        return self.manifest.files[self.file].num_bytes


def plan(root: Path, *, target: int, current: int | None) -> list[Step]:
    """The steps to `target`: from `current` when both are in one chain, else from an anchor.

    Args:
        root: Folder of the policy's versions.
        target: The version to get to.
        current: The version to start from; None starts from an anchor.

    Raises:
        WeightsError: when the target is not published, or a version between it and its anchor is
            missing.
    """
    to_target = _lineage(root, target)
    to_current: Sequence[Manifest] = []
    if current is not None and is_published(root, current):
        to_current = _lineage(root, current)
    ancestor = common_ancestor(to_current, to_target)
    if ancestor is None:
        return _from_anchor(root, to_target, target=target)
    inverses = [Step(manifest, "inverse") for manifest in reversed(_below(ancestor, to_current))]
    return inverses + [Step(manifest, "forward") for manifest in _below(ancestor, to_target)]


def common_ancestor(current: Sequence[Manifest], target: Sequence[Manifest]) -> int | None:
    """The newest version that is in both lineages; None when their chains are separate.

    Args:
        current: A version and its ancestors, oldest first.
        target: Another version and its ancestors, oldest first.
    """
    versions = {manifest.version for manifest in current}
    shared = [manifest.version for manifest in target if manifest.version in versions]
    return shared[-1] if shared else None


def _below(ancestor: int, lineage: Sequence[Manifest]) -> Sequence[Manifest]:
    """The versions of a lineage that descend from `ancestor`, oldest first."""
    versions = [manifest.version for manifest in lineage]
    return lineage[versions.index(ancestor) + 1 :]


def _lineage(root: Path, version: int) -> list[Manifest]:
    """The version and its ancestors, oldest first, back to an anchor or to a gap."""
    lineage = [read_manifest(root, version)]
    while (parent := lineage[0].parent_version) is not None and is_published(root, parent):
        if parent in {manifest.version for manifest in lineage}:
            raise WeightsError(f"the chain to version {version} runs in a circle at {parent}")
        lineage.insert(0, read_manifest(root, parent))
    return lineage


def _from_anchor(root: Path, lineage: list[Manifest], *, target: int) -> list[Step]:
    oldest = lineage[0]
    if oldest.kind != "anchor":
        raise WeightsError(
            f"version {target} needs version {oldest.parent_version}, which is missing below"
            f" {root}; {_nearest_anchor(root, target)}"
        )
    return [Step(manifest, "forward") for manifest in lineage]


def _nearest_anchor(root: Path, target: int) -> str:
    """The half of an error message that names an anchor to start from."""
    versions = sorted(int(folder.name[1:]) for folder in root.glob("v[0-9]*"))
    anchors = [
        version
        for version in versions
        if is_published(root, version) and read_manifest(root, version).kind == "anchor"
    ]
    if not anchors:
        return "no anchor is left"
    nearest = min(anchors, key=lambda version: abs(version - target))
    return f"the nearest anchor is version {nearest}"


def resolve(
    root: Path, *, target: int, current: int | None = None, base: Weights | None = None
) -> dict[str, HostTensor]:
    """The full weights of `target`, every tensor verified.

    Args:
        root: Folder of the policy's versions.
        target: The version to get to.
        current: Version of `base`; None starts from the target's anchor.
        base: The weights to start from. They are never altered; the result shares the tensors that
            do not change with them.

    Raises:
        WeightsError: when a version is missing, a file is damaged, or `base` does not hold the
            weights of `current`.
    """
    steps = plan(root, target=target, current=current if base is not None else None)
    weights = dict(base or {})
    for step in steps:
        weights = _replay(root, step, weights)
    manifest = read_manifest(root, target)
    verify(weights, manifest)
    return {name: weights[name] for name in manifest.tensors}


def verify(weights: Weights, manifest: Manifest) -> None:
    """Check that `weights` are those of the manifest, bit for bit.

    Raises:
        WeightsError: when a tensor is missing or differs; the message names the first.
    """
    for name, entry in manifest.tensors.items():
        tensor = weights.get(name)
        if tensor is None:
            raise WeightsError(f"tensor {name!r} of version {manifest.version} is missing")
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            raise WeightsError(
                f"tensor {name!r} is {tensor.dtype}{tensor.shape}, but version {manifest.version}"
                f" has {entry.dtype}{entry.shape}"
            )
        if tensor.sha256() != entry.sha256:
            raise WeightsError(
                f"tensor {name!r} does not have the checksum of version {manifest.version}"
            )


def _replay(root: Path, step: Step, weights: Weights) -> dict[str, HostTensor]:
    data = _read_payloads(root, step)
    result = {name: weights[name] for name in step.manifest.tensors if name in weights}
    for name, entry in step.manifest.tensors.items():
        payload = entry.forward if step.direction == "forward" else entry.inverse
        if payload is not None:
            result[name] = _decode_tensor(name, entry, payload, data, result.get(name))
    return result


def _read_payloads(root: Path, step: Step) -> bytes:
    """The whole payload file; its checksum is verified before any byte is decoded."""
    file = version_folder(root, step.manifest.version) / step.file
    expected = step.manifest.files[step.file]
    try:
        data = file.read_bytes()
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error
    if len(data) != expected.num_bytes or hashlib.sha256(data).hexdigest() != expected.sha256:
        raise WeightsError(
            f"{file} is damaged: its size or checksum is not the one in the manifest;"
            " copy the version again"
        )
    return data


def _decode_tensor(
    name: str, entry: TensorEntry, payload: Payload, data: bytes, old: HostTensor | None
) -> HostTensor:
    element = bits_dtype(entry.dtype)
    like: Bits = np.empty(int(np.prod(entry.shape, dtype=np.int64)), dtype=element)
    if old is not None and (old.dtype, old.shape) != (entry.dtype, entry.shape):
        raise WeightsError(
            f"tensor {name!r} is {old.dtype}{old.shape} in the base, but the payload changes a"
            f" {entry.dtype}{entry.shape}"
        )
    raw = data[payload.offset : payload.offset + payload.num_bytes]
    base = None if old is None else old.bits
    return HostTensor(entry.dtype, entry.shape, decode(payload.encoding, base, raw, like=like))
