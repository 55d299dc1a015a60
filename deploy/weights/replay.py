"""From the version that is here to the version that is wanted.

Versions form a tree: a delta leads from its parent to it and its inverse leads back; an anchor
stands alone. A path never jumps: every step starts from the exact weights that it was written
against, and the result is checked against the target's own checksums.
"""

import hashlib
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
    """One payload file to replay: `manifest`'s way here, or its way back to the parent."""

    manifest: Manifest
    direction: Literal["forward", "inverse"]

    @property
    def file(self) -> str:
        """Name of the payload file."""
        return FORWARD if self.direction == "forward" else INVERSE

    @property
    def num_bytes(self) -> int:
        """Size of the payload file."""
        return self.manifest.files[self.file].num_bytes


def plan(root: Path, *, target: int, current: int | None) -> list[Step]:
    """The steps to `target`, from `current` when a contiguous path exists, else from an anchor.

    Raises:
        WeightsError: when the target is not published, or its chain has a gap and no anchor.
    """
    to_target = _lineage(root, target)
    if current is None:
        return _from_anchor(root, to_target, target=target)
    if current == target:
        return []
    # Inverses up to the nearest version that both descend from, then forward again.
    upwards: list[Step] = []
    at: int | None = current
    while at is not None and at not in {step.version for step in to_target}:
        manifest = read_manifest(root, at) if is_published(root, at) else None
        if manifest is None or manifest.kind == "anchor":
            return _from_anchor(root, to_target, target=target)
        upwards.append(Step(manifest, "inverse"))
        at = manifest.parent_version
    versions = [manifest.version for manifest in to_target]
    if at not in versions:
        return _from_anchor(root, to_target, target=target)
    downwards = to_target[versions.index(at) + 1 :]
    return upwards + [Step(manifest, "forward") for manifest in downwards]


def _lineage(root: Path, target: int) -> list[Manifest]:
    """The target and its contiguous ancestors, oldest first, back to the nearest anchor."""
    lineage = [read_manifest(root, target)]
    while (parent := lineage[0].parent_version) is not None and is_published(root, parent):
        if parent in {manifest.version for manifest in lineage}:
            raise WeightsError(f"the chain to version {target} runs in a circle at {parent}")
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
        target: Version that is wanted.
        current: Version of `base`; None takes the nearest anchor.
        base: Weights that are here; tensors that do not change are shared with the result.

    Raises:
        WeightsError: for a missing version, a gap, a damaged file or weights that do not fit. The
            base is never altered.
    """
    steps = plan(root, target=target, current=current if base is not None else None)
    weights = dict(base or {})
    for step in steps:
        weights = _replay(root, step, weights)
    manifest = read_manifest(root, target)
    verify(weights, manifest)
    return {name: weights[name] for name in manifest.tensors}


def verify(weights: Weights, manifest: Manifest) -> None:
    """Check every tensor against the manifest.

    Raises:
        WeightsError: naming the first tensor that differs.
    """
    for name, entry in manifest.tensors.items():
        tensor = weights.get(name)
        if tensor is None:
            raise WeightsError(f"tensor {name!r} of version {manifest.version} is missing")
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            raise WeightsError(f"tensor {name!r} is {tensor.dtype}{tensor.shape}")
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
    """The payload file as a whole, checked before a byte of it is used."""
    file = version_folder(root, step.manifest.version) / step.file
    expected = step.manifest.files[step.file]
    try:
        data = file.read_bytes()
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error
    if len(data) != expected.num_bytes or hashlib.sha256(data).hexdigest() != expected.sha256:
        raise WeightsError(f"{file} is damaged: its checksum is not the one in the manifest")
    return data


def _decode_tensor(
    name: str, entry: TensorEntry, payload: Payload, data: bytes, old: HostTensor | None
) -> HostTensor:
    element = bits_dtype(entry.dtype)
    like: Bits = np.empty(int(np.prod(entry.shape, dtype=np.int64)), dtype=element)
    if old is not None and (old.dtype, old.shape) != (entry.dtype, entry.shape):
        raise WeightsError(f"tensor {name!r} is {old.dtype}{old.shape} in the base")
    raw = data[payload.offset : payload.offset + payload.num_bytes]
    base = None if old is None else old.bits
    return HostTensor(entry.dtype, entry.shape, decode(payload.encoding, base, raw, like=like))
