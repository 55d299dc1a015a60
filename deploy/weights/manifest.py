"""The description of one published version, and the rule for reading it.

    weights/<policy>/v000012/
    ├── manifest.json   what this file declares
    ├── forward.bin     payloads that lead here: the full weights, or the change from the parent
    ├── inverse.bin     payloads that lead back to the parent (deltas only)
    └── READY           checksum of manifest.json, written last

A folder without a READY that fits its manifest does not exist for a reader.
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
    """Where the bytes of one tensor lie in a payload file."""

    encoding: Encoding
    offset: int = Field(ge=0)
    num_bytes: int = Field(ge=0)


class TensorEntry(_Model):
    """One tensor of a version; without payloads it is the parent's, bit for bit."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    """Of the values of this version."""
    num_changed: int = Field(ge=0)
    """Elements whose bits differ from the parent's; all of them in an anchor."""
    forward: Payload | None = None
    inverse: Payload | None = None
    parent_sha256: str | None = None
    """Of the values that `forward` starts from and `inverse` gives back."""


class FileEntry(_Model):
    """A payload file."""

    sha256: str
    num_bytes: int = Field(ge=0)


class Manifest(_Model):
    """A published version."""

    format_version: Literal[1] = 1
    policy: str
    version: int = Field(ge=1)
    origin: str = ""
    """Name of the checkpoint that it was made of. Numbers begin anew in another registry."""
    parent_version: int | None = None
    """The version that a delta starts from."""
    kind: Literal["anchor", "delta"]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    num_changed: int = Field(ge=0)
    num_elements: int = Field(ge=0)
    num_bytes: int = Field(ge=0)
    """What has to travel to go from the parent to this version."""
    full_bytes: int = Field(ge=0)
    """What the dense weights take."""

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
        """One checksum over all resulting tensors."""
        return digest({name: entry.sha256 for name, entry in self.tensors.items()})


def digest(checksums: Mapping[str, str]) -> str:
    """One checksum over the checksums of tensors by name."""
    lines = (f"{name} {checksums[name]}\n" for name in sorted(checksums))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def version_folder(root: Path, version: int) -> Path:
    """Folder of a version below the policy's weights root."""
    return root / f"v{version:06d}"


def is_published(root: Path, version: int) -> bool:
    """Whether the version was written to its end."""
    return (version_folder(root, version) / READY).is_file()


def read_manifest(root: Path, version: int) -> Manifest:
    """The manifest of a published version.

    Raises:
        WeightsError: when the version is missing, half-written, or its manifest was altered.
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
