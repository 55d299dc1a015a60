"""Tensors of a checkpoint as bit patterns, read from safetensors files without a tensor library.

Weights are compared and stored as unsigned integers, because two floats are the same weight only
when their bits are equal. Tensor names are those of the Hugging Face checkpoint.
"""

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onlinerl.errors import WeightsError

Bits = NDArray[np.unsignedinteger]
"""A one-dimensional array of little-endian integers, each as wide as an element."""

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element by safetensors dtype name."""


@dataclass(frozen=True)
class HostTensor:
    """One tensor of a checkpoint, in host memory or mapped from its file."""

    dtype: str
    """Safetensors dtype name, e.g. `BF16`."""
    shape: tuple[int, ...]
    bits: Bits
    """The values in row-major order."""

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return int(self.bits.nbytes)

    def sha256(self) -> str:
        """Checksum of the values alone, without name, dtype and shape."""
        return hashlib.sha256(np.ascontiguousarray(self.bits).data).hexdigest()


Weights = Mapping[str, HostTensor]
"""A full set of weights: tensors by checkpoint name."""


def bits_dtype(dtype: str) -> np.dtype[np.unsignedinteger]:
    """The unsigned integer type that holds an element of `dtype`.

    Raises:
        WeightsError: when the dtype is not one of safetensors.
    """
    if dtype not in _ITEM_BYTES:
        raise WeightsError(f"dtype {dtype!r} is not known; expected one of {sorted(_ITEM_BYTES)}")
    return np.dtype(f"<u{_ITEM_BYTES[dtype]}")


def read_checkpoint(folder: Path) -> dict[str, HostTensor]:
    """All tensors of a Hugging Face checkpoint folder by name.

    Files are memory-mapped, so that only the tensors that are used take memory.

    Raises:
        WeightsError: when there is no safetensors file, a file is damaged, or two files hold a
            tensor of the same name.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no *.safetensors file")
    weights: dict[str, HostTensor] = {}
    for file in files:
        for name, tensor in _read_file(file):
            if name in weights:
                raise WeightsError(f"tensor {name!r} is in two files of {folder}")
            weights[name] = tensor
    return weights


def _read_file(file: Path) -> Iterator[tuple[str, HostTensor]]:
    """Names and tensors of a file: u64 header size, JSON header, values at the header's offsets."""
    with file.open("rb") as stream:
        size = file.stat().st_size
        if size < 8:
            raise WeightsError(f"{file} is not a safetensors file: {size} bytes")
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > size - 8:
            raise WeightsError(f"{file} is cut short: its header should have {header_bytes} bytes")
        try:
            header: dict[str, dict[str, object]] = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise WeightsError(f"{file} has no readable safetensors header: {error}") from error
        # Copy-on-write: consumers that need writable memory get it without a copy of the file.
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    payload = memoryview(mapped)[8 + header_bytes :]
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _tensor(file, name, entry, payload)


def _tensor(file: Path, name: str, entry: dict[str, object], payload: memoryview) -> HostTensor:
    dtype, shape, offsets = str(entry["dtype"]), entry["shape"], entry["data_offsets"]
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    element = bits_dtype(dtype)
    start, end = offsets
    if end > len(payload) or end - start != int(np.prod(shape, dtype=np.int64)) * element.itemsize:
        raise WeightsError(f"{file}: tensor {name!r} does not fit its file or its shape {shape}")
    return HostTensor(dtype, tuple(shape), np.frombuffer(payload[start:end], dtype=element))
