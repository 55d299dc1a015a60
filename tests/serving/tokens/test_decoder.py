from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from onlinerl.serving.tokens.codec import TokenCodec
from onlinerl.serving.tokens.decoder import ByteStream, StopFinder, TextStream
from tests.serving.small_tokenizers import small_tokenizer


def streamed(renderer: TemplateRenderer, ids: list[int]) -> list[str]:
    stream = TextStream(renderer.decode)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


def test_a_character_over_several_tokens_comes_whole(renderer: TemplateRenderer) -> None:
    ids = renderer.tokenize("a🙂b")
    pieces = streamed(renderer, ids)

    assert len(ids) > 3
    assert "".join(pieces) == "a🙂b"
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_skipped(renderer: TemplateRenderer) -> None:
    ids = [*renderer.tokenize("Hi"), 2, *renderer.tokenize(" there"), 2]

    assert "".join(streamed(renderer, ids)) == "Hi there"


def test_an_answer_that_ends_inside_a_character_shows_a_replacement(
    renderer: TemplateRenderer,
) -> None:
    ids = renderer.tokenize("ab🙂")[:-1]

    assert "".join(streamed(renderer, ids)) == renderer.decode(ids)
    assert streamed(renderer, ids)[-1] == "\ufffd"


def test_a_sampled_replacement_character_is_not_held_back_for_long(
    renderer: TemplateRenderer,
) -> None:
    ids = renderer.tokenize("\ufffd\ufffd ok")

    assert "".join(streamed(renderer, ids)) == "\ufffd\ufffd ok"


def byte_fallback() -> Tokenizer:
    """A vocabulary of all bytes, as SentencePiece models have, and a; a byte is its own id."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([0xE4, 0xBD, 0xA0], ["", "", "你", ""]),
        ([256, 0xE4, 0xBD, 0xA0, 256], ["a", "", "", "你", "a", ""]),
        ([0xE4, 0xBD, 0xA0] * 2, ["", "", "你", "", "", "你", ""]),
        ([*"🙂".encode()] * 2, ["", "", "", "🙂", "", "", "", "🙂", ""]),
        ([0xE4, 0xBD], ["", "", "\ufffd\ufffd"]),
        ([0xFF] * 5, ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3]),
    ],
    ids=["alone", "within text", "twice", "emoji", "unfinished", "invalid"],
)
def test_bytes_of_a_fallback_wait_for_their_character(ids: list[int], pieces: list[str]) -> None:
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer.decode)

    assert [*(stream.push(token_id) for token_id in ids), stream.flush()] == pieces


@given(text=st.text(alphabet="aé你🙂", max_size=12))
def test_pieces_of_fallback_bytes_add_up_to_their_text(text: str) -> None:
    tokenizer = byte_fallback()
    stream = TextStream(tokenizer.decode)
    pieces = [stream.push(token_id) for token_id in tokenizer.encode(text).ids]

    assert "".join(pieces) == text


@given(ids=st.lists(st.integers(min_value=0, max_value=49151), max_size=40))
def test_joined_pieces_equal_decoding_at_once(renderer: TemplateRenderer, ids: list[int]) -> None:
    assert "".join(streamed(renderer, ids)) == renderer.decode(ids)


@given(ids=st.lists(st.integers(min_value=0, max_value=49151), max_size=40))
def test_joined_bytes_equal_decoding_at_once(renderer: TemplateRenderer, ids: list[int]) -> None:
    source = renderer._codec.text_source()
    pieces = [*(source.push(token_id) for token_id in ids), source.flush()]

    assert isinstance(source, ByteStream)
    assert "".join(pieces) == renderer.decode(ids)


@given(data=st.binary(max_size=24))
def test_any_bytes_decode_as_the_tokenizer_decodes_them(data: bytes) -> None:
    codec = every_byte()
    ids = [codec.tokenizer.get_vocab()[character_of(byte)] for byte in data]
    source = codec.text_source()
    pieces = [*(source.push(token_id) for token_id in ids), source.flush()]

    assert "".join(pieces) == codec.decode(ids) == data.decode(errors="replace")


@cache
def every_byte() -> TokenCodec:
    return TokenCodec(small_tokenizer(["<s>"]))


def test_tokens_with_characters_of_their_own_stand_for_themselves() -> None:
    codec = TokenCodec(small_tokenizer(["<▁s▁>"], plain=["<▁x▁>", "é ", "<é>"]))
    ids = [codec.added[text] for text in ("<▁x▁>", "é ", "<▁s▁>", "<é>")]
    source = codec.text_source()
    pieces = [*(source.push(token_id) for token_id in ids), source.flush()]

    assert "".join(pieces) == codec.decode(ids)
    assert pieces[:3] == ["<▁x▁>", "é ", ""]


def test_other_vocabularies_are_decoded_by_their_tokenizer() -> None:
    assert isinstance(TokenCodec(byte_fallback()).text_source(), TextStream)


@given(data=st.binary(max_size=24))
def test_pieces_add_up_for_any_bytes_one_token_each(
    renderer: TemplateRenderer, data: bytes
) -> None:
    ids = [byte_token(renderer, byte) for byte in data]

    assert "".join(streamed(renderer, ids)) == renderer.decode(ids)


def byte_token(renderer: TemplateRenderer, byte: int) -> int:
    """The token of one byte in a byte-level vocabulary (GPT-2's table of printable characters)."""
    token_id = renderer._codec.tokenizer.token_to_id(character_of(byte))
    # SmolLM2 leaves out the bytes that UTF-8 never uses.
    return 0 if token_id is None else int(token_id)


def character_of(byte: int) -> str:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def found(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    finder = StopFinder(stops)
    shown = [finder.push(piece) for piece in pieces]
    return "".join([*shown, finder.flush()]), finder.match


@pytest.mark.parametrize(
    ("pieces", "shown", "stop"),
    [
        (["Hello", " END now"], "Hello ", "END"),
        (["Hello E", "N", "D"], "Hello ", "END"),
        (["Hello E", "N", "S"], "Hello ENS", None),
        (["END"], "", "END"),
        (["HelloEN"], "HelloEN", None),
    ],
    ids=["within a piece", "over three pieces", "almost", "at once", "unfinished at the end"],
)
def test_text_ends_before_the_stop_string(pieces: list[str], shown: str, stop: str | None) -> None:
    assert found(["END"], pieces) == (shown, stop)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopFinder(["\n\nUser:"])

    assert finder.push("Yes.\n") == "Yes."
    assert finder.push("\nUs") == ""
    assert finder.push("ually") == "\n\nUsually"


def test_the_first_of_several_stop_strings_counts() -> None:
    assert found(["b", "a"], ["xxa b"]) == ("xx", "a")


@given(
    text=st.text(alphabet="abE xD", max_size=30),
    cuts=st.lists(st.integers(min_value=0, max_value=30), max_size=5),
    stops=st.lists(st.text(alphabet="abEN", min_size=1, max_size=3), max_size=3),
)
def test_cutting_does_not_depend_on_the_pieces(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    by_character = found(stops, list(text))

    # A piece may complete two stop strings at once; then the one that begins first counts.
    shown, stop = found(stops, pieces)
    assert text.startswith(shown)
    assert (stop is None) == (by_character[1] is None)
    if stop is not None:
        assert text[len(shown) :].startswith(stop)
    else:
        assert shown == text
