"""The description of one published version.

    weights/<policy>/v000012/
    ├── manifest.json   a `Manifest`: tensors, their payloads and checksums
    ├── forward.bin     payloads that lead to this version: the full weights of an anchor, or the
    │                   change from the parent of a delta
    ├── inverse.bin     payloads that lead back to the parent (deltas only)
    └── READY           SHA-256 of manifest.json in hexadecimal, written last

A reader treats a folder without READY as absent, and refuses one whose READY does not fit its
manifest.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from onlinerl.deploy.weights.encodings import Encoding
from onlinerl.errors import WeightsError

MANIFEST = "manifest.json"
READY = "READY"
FORWARD = "forward.bin"
INVERSE = "inverse.bin"
FORMAT_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Payload(_Model):
    """The bytes of one tensor in a payload file."""

    encoding: Encoding
    offset: int = Field(ge=0)
    """Position of the first byte."""
    num_bytes: int = Field(ge=0)


class TensorEntry(_Model):
    """One tensor of a version. Without payloads it equals the parent's tensor, bit for bit."""

    dtype: str
    """Safetensors dtype name, e.g. `BF16`."""
    shape: tuple[int, ...]
    sha256: str
    """Checksum of this version's values."""
    num_changed: int = Field(ge=0)
    """Elements whose bits differ from the parent's; all of them in an anchor."""
    forward: Payload | None = None
    """Payload that gives this version's values."""
    inverse: Payload | None = None
    """Payload that gives the parent's values back."""
    parent_sha256: str | None = None
    """Checksum of the parent's values; None in an anchor."""


class FileEntry(_Model):
    """A payload file."""

    sha256: str
    num_bytes: int = Field(ge=0)


class Manifest(_Model):
    """Everything that a reader needs to know about a published version."""

    format_version: Literal[1] = 1
    policy: str
    version: int = Field(ge=1)
    origin: str = ""
    """Name of the checkpoint it was made of. It tells apart equal numbers of two registries."""
    parent_version: int | None = None
    """The version that a delta starts from; None in an anchor."""
    kind: Literal["anchor", "delta"]
    """Whether the version holds full weights or the change from its parent."""
    tensors: dict[str, TensorEntry]
    """All tensors by checkpoint name, also those that did not change."""
    files: dict[str, FileEntry]
    """The payload files by name."""
    num_changed: int = Field(ge=0)
    """Elements whose bits differ from the parent's; all of them in an anchor."""
    num_elements: int = Field(ge=0)
    """Elements of all tensors."""
    num_bytes: int = Field(ge=0)
    """Size of `forward.bin`: the bytes that an engine on the parent has to fetch."""
    full_bytes: int = Field(ge=0)
    """Size of the full weights, uncompressed, bytes."""

    @model_validator(mode="after")
    def _a_delta_has_a_parent(self) -> Self:
        if (self.kind == "delta") != (self.parent_version is not None):
            raise ValueError("a delta names its parent_version and an anchor does not")
        return self

    @property
    def changed_fraction(self) -> float:
        """Share of elements whose bits differ from the parent's."""
        return self.num_changed / max(1, self.num_elements)

    def digest(self) -> str:
        """One checksum over the tensors of this version."""
        return digest({name: entry.sha256 for name, entry in self.tensors.items()})


def digest(checksums: Mapping[str, str]) -> str:
    """One checksum over the checksums of tensors, given by name, in any order."""
    lines = (f"{name} {checksums[name]}\n" for name in sorted(checksums))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def version_folder(root: Path, version: int) -> Path:
    """Folder of a version below `root`, the folder of the policy's versions."""
    return root / f"v{version:06d}"


def is_published(root: Path, version: int) -> bool:
    """Whether the version was written completely."""
    return (version_folder(root, version) / READY).is_file()


def read_manifest(root: Path, version: int) -> Manifest:
    """The manifest of a published version.

    Raises:
        WeightsError: when the version is missing or incomplete, or its manifest was altered.
    """
    folder = version_folder(root, version)
    if not is_published(root, version):
        raise WeightsError(f"version {version} is not published: {folder / READY} is missing")
    try:
        raw = (folder / MANIFEST).read_bytes()
        expected = (folder / READY).read_text().strip()
    except OSError as error:
        raise WeightsError(f"{folder} cannot be read: {error}") from error
    if hashlib.sha256(raw).hexdigest() != expected:
        raise WeightsError(f"{folder / MANIFEST} does not fit the checksum in {READY}")
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise WeightsError(f"{folder / MANIFEST} is not a manifest: {error}") from error
    if manifest.version != version:
        raise WeightsError(f"{folder / MANIFEST} describes version {manifest.version}")
    return manifest
