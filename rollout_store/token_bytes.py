"""The bytes of single tokens, which logprobs show and scrubbing searches."""

import json
import re
from functools import cache

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Gives the bytes of each token of one tokenizer.

    Args:
        tokenizer: The tokenizer, byte-level or with byte fallback.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        steps = [step.get("type") for step in decoder.get("decoders", [decoder])]
        self._byte_level = "ByteLevel" in steps
        self.is_concatenative = steps == ["ByteLevel"]
        """Whether the bytes of a text are the bytes of its tokens, concatenated."""

    def in_text(self, token_id: int) -> bytes:
        """The bytes of a token within a text; use it only if `is_concatenative`."""
        spelling = self._tokenizer.id_to_token(token_id)
        return b"" if spelling is None else _byte_level(spelling)

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelling = self._tokenizer.id_to_token(token_id)
        if spelling is None:
            return b""
        return _byte_level(spelling) if self._byte_level else _with_fallback(spelling)


def _byte_level(spelling: str) -> bytes:
    """Bytes of a byte-level spelling; a spelling with other characters is encoded as UTF-8."""
    table = _byte_of_character()
    try:
        return bytes(table[character] for character in spelling)
    except KeyError:
        return spelling.encode()


def _with_fallback(spelling: str) -> bytes:
    """SentencePiece spells a lone byte `<0xE4>` and a space as U+2581."""
    byte = _FALLBACK.fullmatch(spelling)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return spelling.replace("\u2581", " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte of each character in GPT-2's spelling.

    Printable bytes are spelled as themselves, the others as characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted
