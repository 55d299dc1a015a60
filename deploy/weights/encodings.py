"""The change of one tensor, losslessly encoded in as few bytes as possible.

There are four encodings; `encode` tries those that apply and keeps the smallest payload:

- `full`: the new values. Needs no base.
- `overwrite`: the positions that changed and the new values there. May be applied twice.
- `ulp`: the positions that changed and the distance in representable numbers. Needs the exact base.
- `xor_shuffle`: old XOR new for every element. Needs the exact base; best when most changed.

Multi-byte values are split into byte planes before compression (zstd, level 1). The high byte of a
small distance is nearly always zero, and a run of zeros costs nothing.
"""

from typing import Literal, get_args

import numpy as np
import zstandard
from numpy.typing import NDArray

from onlinerl.deploy.weights.tensors import Bits
from onlinerl.errors import WeightsError

Encoding = Literal["full", "overwrite", "ulp", "xor_shuffle"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

_LEVEL = 1
_ESCAPE = 255


def encode(old: Bits | None, new: Bits) -> tuple[Encoding, bytes]:
    """The smallest payload that turns `old` into `new`, and its encoding.

    Without `old` the encoding is `full`.
    """
    if old is None:
        return "full", encode_as("full", new, new)
    # `full` loses to `xor_shuffle` only when the base helps, so all are tried.
    payloads = {encoding: encode_as(encoding, old, new) for encoding in ENCODINGS}
    best = min(ENCODINGS, key=lambda encoding: len(payloads[encoding]))
    return best, payloads[best]


def encode_as(encoding: Encoding, old: Bits, new: Bits) -> bytes:
    """The payload that turns `old` into `new`, in the given encoding."""
    if encoding == "full":
        return _compress(_planes(new))
    if encoding == "xor_shuffle":
        return _compress(_planes(old ^ new))
    changed = np.flatnonzero(old != new)
    gaps = _gaps(changed)
    values = new[changed] if encoding == "overwrite" else _steps(old[changed], new[changed])
    return _compress(len(gaps).to_bytes(8, "little") + gaps.tobytes() + _planes(values))


def decode(encoding: Encoding, old: Bits | None, payload: bytes, *, like: Bits) -> Bits:
    """The new values that a payload and its base give.

    Args:
        encoding: Encoding of `payload`.
        old: The base; None is allowed for `full` only.
        payload: Bytes from `encode`.
        like: An array with the length and type of the result.

    Raises:
        WeightsError: when the payload is damaged or does not fit `old` and `like`.
    """
    data = _decompress(payload, max_bytes=_max_raw_bytes(like))
    if encoding == "full":
        return _unplanes(data, count=like.size, dtype=like.dtype)
    if old is None:
        raise WeightsError(f"a payload encoded as {encoding!r} needs the version before it")
    if encoding == "xor_shuffle":
        return old ^ _unplanes(data, count=like.size, dtype=like.dtype)
    return _apply_sparse(encoding, old, data)


def _apply_sparse(encoding: Encoding, old: Bits, data: bytes) -> Bits:
    num_gap_bytes = int.from_bytes(data[:8], "little")
    if num_gap_bytes > len(data) - 8:
        raise WeightsError("a payload is cut short: it ends within its positions")
    changed = _positions(np.frombuffer(data, np.uint8, count=num_gap_bytes, offset=8))
    if changed.size and changed[-1] >= old.size:
        raise WeightsError(f"a payload changes element {changed[-1]} of {old.size}")
    values = _unplanes(data[8 + num_gap_bytes :], count=changed.size, dtype=old.dtype)
    new = old.copy()
    new[changed] = values if encoding == "overwrite" else _step(old[changed], values)
    return new


def _gaps(positions: NDArray[np.intp]) -> NDArray[np.uint8]:
    """Distances between sorted positions, one byte each; 255 means "add 255 and read on"."""
    distances = np.diff(positions, prepend=0)
    num_escapes = distances // _ESCAPE
    ends = np.cumsum(num_escapes + 1) - 1
    stream = np.full(int(ends[-1]) + 1 if ends.size else 0, _ESCAPE, dtype=np.uint8)
    stream[ends] = distances % _ESCAPE
    return stream


def _positions(stream: NDArray[np.uint8]) -> NDArray[np.int64]:
    at = np.cumsum(stream, dtype=np.int64)
    positions: NDArray[np.int64] = at[stream != _ESCAPE]
    return positions


def _ordered(bits: Bits) -> Bits:
    """Floats as unsigned integers in the same order, so that neighbours differ by one."""
    sign = np.array(1, bits.dtype) << np.array(bits.dtype.itemsize * 8 - 1, bits.dtype)
    return np.where(bits & sign, ~bits, bits | sign)


def _unordered(ordered: Bits) -> Bits:
    sign = np.array(1, ordered.dtype) << np.array(ordered.dtype.itemsize * 8 - 1, ordered.dtype)
    return np.where(ordered & sign, ordered ^ sign, ~ordered)


def _steps(old: Bits, new: Bits) -> Bits:
    """Zig-zag distance in representable numbers: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    signed = np.dtype(f"<i{old.dtype.itemsize}")
    # A long distance wraps around at the end of the type, and `_step` wraps it back.
    distance = (_ordered(new) - _ordered(old)).view(signed)
    zigzag = (distance << 1) ^ (distance >> (old.dtype.itemsize * 8 - 1))
    return zigzag.view(old.dtype)


def _step(old: Bits, zigzag: Bits) -> Bits:
    """The inverse of `_steps`: `old` moved by its distances."""
    signed = np.dtype(f"<i{old.dtype.itemsize}")
    distance = (zigzag >> 1).view(signed) ^ -(zigzag & 1).view(signed)
    return _unordered(_ordered(old) + distance.view(old.dtype))


def _planes(values: Bits) -> bytes:
    """All first bytes, then all second bytes, and so on."""
    bytes_by_element = values.reshape(-1, 1).view(np.uint8)
    return np.ascontiguousarray(bytes_by_element.T).tobytes()


def _unplanes(data: bytes, *, count: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    if len(data) != count * dtype.itemsize:
        raise WeightsError(f"a payload holds {len(data)} bytes, not {count * dtype.itemsize}")
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, count)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _max_raw_bytes(like: Bits) -> int:
    """Size of the largest valid payload: every element has a gap byte, escapes and a full value."""
    return 8 + like.size * (1 + like.dtype.itemsize) + like.size // _ESCAPE + 1


def _compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _decompress(payload: bytes, *, max_bytes: int) -> bytes:
    """Decompress at most `max_bytes`, so that a damaged header cannot ask for all memory."""
    try:
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= max_bytes:
            raise WeightsError(f"a payload claims {size} bytes where {max_bytes} are possible")
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=max_bytes)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a payload cannot be decompressed: {error}") from error
