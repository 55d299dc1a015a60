"""Weights, versions and controllers for the tests of deploy."""

import hashlib
import json
from pathlib import Path

import numpy as np

from onlinerl.deploy.weights.tensors import Bits, HostTensor

SHAPES = {"model.embed_tokens.weight": (64, 8), "model.norm.weight": (8,)}


def bf16(*values: float) -> Bits:
    """Bits of bf16 numbers that are exact in bf16."""
    return (np.array(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def weights(seed: int = 0) -> dict[str, HostTensor]:
    """Random bf16 weights."""
    generator = np.random.default_rng(seed)
    return {
        name: HostTensor(
            "BF16",
            shape,
            generator.integers(0, 2**16, size=int(np.prod(shape)), dtype=np.uint16),
        )
        for name, shape in SHAPES.items()
    }


def nudged(
    base: dict[str, HostTensor], *, seed: int = 1, share: float = 0.1
) -> dict[str, HostTensor]:
    """The same with some elements one representable number away."""
    generator = np.random.default_rng(seed)
    moved = {}
    for name, tensor in base.items():
        bits = tensor.bits.copy()
        bits[generator.random(bits.size) < share] ^= 1
        moved[name] = HostTensor(tensor.dtype, tensor.shape, bits)
    return moved


def equal(one: dict[str, HostTensor], other: dict[str, HostTensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and bool((one[name].bits == other[name].bits).all())
        for name in one
    )


def write_checkpoint(folder: Path, tensors: dict[str, HostTensor], **fields: object) -> Path:
    """A checkpoint as a trainer registers it."""
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    raw = (folder / "model.safetensors").read_bytes()
    manifest = {
        "policy": "assistant",
        "files": {"model.safetensors": hashlib.sha256(raw).hexdigest()},
    } | fields
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    return folder


def write_safetensors(file: Path, tensors: dict[str, HostTensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for name, tensor in tensors.items():
        data = tensor.bits.tobytes()
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [len(payload), len(payload) + len(data)],
        }
        payload += data
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + payload)
