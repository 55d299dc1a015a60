"""Publishing a version: write all files under a temporary name, fsync, rename, and READY last.

A crash at any moment leaves either the whole version or a folder without READY, which is no
version. Publishing a version again with the same weights does nothing, so a controller that died
half-way publishes once more.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from onlinerl.deploy.weights.encodings import encode
from onlinerl.deploy.weights.manifest import (
    FORWARD,
    INVERSE,
    MANIFEST,
    READY,
    FileEntry,
    Manifest,
    Payload,
    TensorEntry,
    is_published,
    read_manifest,
    version_folder,
)
from onlinerl.deploy.weights.tensors import HostTensor, Weights
from onlinerl.errors import WeightsError
from onlinerl.process.files import replace_file, replaced_folder

logger = logging.getLogger(__name__)


def write_anchor(
    root: Path, *, policy: str, version: int, weights: Weights, origin: str = ""
) -> Manifest:
    """Publish a version as its full weights.

    Args:
        root: Folder of the policy's versions.
        policy: Name of the policy.
        version: Number of the version.
        weights: All its tensors.
        origin: Name of the checkpoint that the weights come from.

    Raises:
        WeightsError: when the version is published already with other weights.
    """
    return _publish(
        root, policy=policy, version=version, weights=weights, origin=origin, parent=None
    )


def write_delta(
    root: Path,
    *,
    policy: str,
    version: int,
    weights: Weights,
    parent_version: int,
    parent: Weights,
    origin: str = "",
) -> Manifest:
    """Publish a version as the change from its parent, and the inverse of that change.

    Args:
        root: Folder of the policy's versions.
        policy: Name of the policy.
        version: Number of the version.
        weights: All its tensors.
        parent_version: Number of the parent, which is published already.
        parent: All tensors of the parent.
        origin: Name of the checkpoint that the weights come from.

    Raises:
        WeightsError: when names, shapes or dtypes of the two differ (publish an anchor then), or
            the version is published already with other weights.
    """
    _check_same_layout(parent, weights)
    if version == parent_version:
        raise WeightsError(f"version {version} cannot be a delta on itself")
    return _publish(
        root,
        policy=policy,
        version=version,
        weights=weights,
        origin=origin,
        parent=(parent_version, parent),
    )


def same_layout(one: Weights, other: Weights) -> bool:
    """Whether names, shapes and dtypes are equal, so that a delta between the two is possible."""
    return _layout(one) == _layout(other)


def _layout(weights: Weights) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}


def _check_same_layout(parent: Weights, child: Weights) -> None:
    old, new = _layout(parent), _layout(child)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise WeightsError(
                f"tensor {name!r} is {new.get(name)} here and {old.get(name)} in the parent;"
                " a delta needs equal names, shapes and dtypes: publish an anchor instead"
            )


def _publish(
    root: Path,
    *,
    policy: str,
    version: int,
    weights: Weights,
    origin: str,
    parent: tuple[int, Weights] | None,
) -> Manifest:
    if is_published(root, version):
        return _confirm_published(root, version, weights)
    folder = version_folder(root, version)
    # An earlier attempt that did not get to READY may have left a folder; it is replaced.
    with replaced_folder(folder) as staging:
        manifest = _write_payloads(
            staging,
            policy=policy,
            version=version,
            weights=weights,
            origin=origin,
            parent=parent,
        )
        raw = manifest.model_dump_json(indent=1).encode()
        replace_file(staging / MANIFEST, raw)
    replace_file(folder / READY, hashlib.sha256(raw).hexdigest())
    logger.info(
        "weights published",
        extra={"version": version, "kind": manifest.kind, "num_bytes": manifest.num_bytes},
    )
    return manifest


def _confirm_published(root: Path, version: int, weights: Weights) -> Manifest:
    manifest = read_manifest(root, version)
    checksums = {name: tensor.sha256() for name, tensor in weights.items()}
    if checksums != {name: entry.sha256 for name, entry in manifest.tensors.items()}:
        raise WeightsError(
            f"version {version} is published with other weights in {version_folder(root, version)};"
            " a published version never changes: publish these weights under a new number"
        )
    return manifest


class _PayloadFile:
    """Appends payloads to a file and computes the checksum of the whole file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def append(self, old: HostTensor | None, new: HostTensor) -> Payload:
        encoding, data = encode(None if old is None else old.bits, new.bits)
        payload = Payload(encoding=encoding, offset=self.num_bytes, num_bytes=len(data))
        self._stream.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)
        return payload

    def entry(self) -> FileEntry:
        return FileEntry(sha256=self._hash.hexdigest(), num_bytes=self.num_bytes)


def _write_payloads(
    folder: Path,
    *,
    policy: str,
    version: int,
    weights: Weights,
    origin: str,
    parent: tuple[int, Weights] | None,
) -> Manifest:
    kind: Literal["anchor", "delta"] = "anchor" if parent is None else "delta"
    files: dict[str, FileEntry] = {}
    with (folder / FORWARD).open("wb") as forward, (folder / INVERSE).open("wb") as inverse:
        writers = _PayloadFile(forward), _PayloadFile(inverse)
        tensors = {
            name: _write_tensor(weights[name], None if parent is None else parent[1][name], writers)
            for name in sorted(weights)
        }
        files[FORWARD] = writers[0].entry()
        if parent is not None:
            files[INVERSE] = writers[1].entry()
    if parent is None:
        (folder / INVERSE).unlink()
    return Manifest(
        policy=policy,
        version=version,
        origin=origin,
        parent_version=None if parent is None else parent[0],
        kind=kind,
        tensors=tensors,
        files=files,
        num_changed=sum(entry.num_changed for entry in tensors.values()),
        num_elements=sum(tensor.bits.size for tensor in weights.values()),
        num_bytes=files[FORWARD].num_bytes,
        full_bytes=full_bytes(weights),
    )


def full_bytes(weights: Mapping[str, HostTensor]) -> int:
    """Size of the full weights, uncompressed, bytes."""
    return sum(tensor.num_bytes for tensor in weights.values())


def _write_tensor(
    new: HostTensor, old: HostTensor | None, writers: tuple[_PayloadFile, _PayloadFile]
) -> TensorEntry:
    forward, inverse = writers
    if old is None:
        return TensorEntry(
            dtype=new.dtype,
            shape=new.shape,
            sha256=new.sha256(),
            num_changed=new.bits.size,
            forward=forward.append(None, new),
        )
    num_changed = int(np.count_nonzero(old.bits != new.bits))
    return TensorEntry(
        dtype=new.dtype,
        shape=new.shape,
        sha256=new.sha256(),
        num_changed=num_changed,
        forward=forward.append(old, new) if num_changed else None,
        inverse=inverse.append(new, old) if num_changed else None,
        parent_sha256=old.sha256(),
    )
