import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.deploy.weights.encodings import ENCODINGS, Encoding, decode, encode, encode_as
from onlinerl.deploy.weights.tensors import Bits
from onlinerl.errors import WeightsError
from tests.deploy.builders import bf16

ONE, ONE_UP, ONE_DOWN = 0x3F80, 0x3F81, 0x3F7F


def raw(payload: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(payload)


def bits(*values: int) -> Bits:
    return np.array(values, dtype=np.uint16)


def test_overwrite_stores_gaps_and_new_values_in_planes() -> None:
    old = bits(0, 0, 0, 0, 0)
    new = bits(0, 0x1234, 0, 0, 0x5678)

    # Eight bytes of length, gaps 1 and 3, low bytes, high bytes.
    assert raw(encode_as("overwrite", old, new)) == (
        b"\x02" + bytes(7) + b"\x01\x03" + b"\x34\x78" + b"\x12\x56"
    )


def test_a_gap_of_255_takes_an_escape() -> None:
    old, new = np.zeros(600, np.uint16), np.zeros(600, np.uint16)
    new[[254, 509]] = 7

    payload = raw(encode_as("overwrite", old, new))

    assert payload[8:11] == b"\xfe\xff\x00"
    assert (decode("overwrite", old, encode_as("overwrite", old, new), like=old) == new).all()


def test_ulp_counts_representable_numbers_over_zero() -> None:
    old = bits(ONE, ONE, 0x0000, 0x8000)
    new = bits(ONE_UP, ONE_DOWN, 0x8000, 0x0001)

    # +1, -1, from +0 to -0 is one down, from -0 to the smallest number is two up.
    assert raw(encode_as("ulp", old, new))[12:16] == bytes([2, 1, 1, 4])


def test_bits_and_not_values_decide_what_changed() -> None:
    old, new = bf16(0.0), bits(0x8000)  # 0.0 and -0.0 are equal as floats

    encoding, payload = encode(old, new)

    assert (decode(encoding, old, payload, like=old) == new).all()


@given(
    old=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=700),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.003, 0.3, 1.0]),
    width=st.sampled_from([1, 2, 4, 8]),
)
def test_every_encoding_gives_back_every_bit(
    old: list[int], seed: int, share: float, width: int
) -> None:
    generator = np.random.default_rng(seed)
    dtype = np.dtype(f"<u{width}")
    base = np.array(old).astype(dtype)
    new = base.copy()
    chosen = generator.random(base.size) < share
    top = np.iinfo(dtype).max
    new[chosen] = generator.integers(0, top, size=int(chosen.sum()), dtype=dtype, endpoint=True)

    for encoding in ENCODINGS:
        payload = encode_as(encoding, base, new)
        assert (decode(encoding, base, payload, like=base) == new).all()


def test_the_smallest_encoding_wins() -> None:
    generator = np.random.default_rng(0)
    old = generator.integers(0, 2**16, size=4096, dtype=np.uint16)
    few = old.copy()
    few[::500] += 1

    encoding, payload = encode(old, few)

    assert encoding in ("ulp", "overwrite")
    assert len(payload) == min(len(encode_as(each, old, few)) for each in ENCODINGS)
    assert encode(None, few)[0] == "full"


def test_overwrite_may_be_applied_twice() -> None:
    old, new = bits(1, 2, 3), bits(1, 9, 3)
    payload = encode_as("overwrite", old, new)

    once = decode("overwrite", old, payload, like=old)

    assert (decode("overwrite", once, payload, like=old) == new).all()


@pytest.mark.parametrize("encoding", ["overwrite", "ulp", "xor_shuffle"])
def test_a_change_without_a_base_is_refused(encoding: Encoding) -> None:
    payload = encode_as(encoding, bits(1, 2), bits(1, 3))

    with pytest.raises(WeightsError, match="needs the version before"):
        decode(encoding, None, payload, like=bits(0, 0))


def test_a_position_beyond_the_end_is_refused() -> None:
    payload = encode_as("overwrite", bits(0, 0, 0), bits(0, 0, 1))

    with pytest.raises(WeightsError, match="element 2 of 2"):
        decode("overwrite", bits(0, 0), payload, like=bits(0, 0))


def test_a_payload_cannot_ask_for_more_memory_than_its_tensor_needs() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(10_000_000))

    with pytest.raises(WeightsError, match="claims 10000000 bytes"):
        decode("full", None, bomb, like=bits(0, 0))


def test_a_damaged_payload_raises_weights_error() -> None:
    payload = encode_as("full", bits(1), bits(1, 2, 3))

    with pytest.raises(WeightsError):
        decode("full", None, payload[:-3], like=bits(0, 0, 0))
    with pytest.raises(WeightsError):
        decode("full", None, b"nonsense", like=bits(0, 0, 0))
