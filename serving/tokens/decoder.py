"""Text from token ids, as they come.

The joined pieces of a stream are exactly the text of all ids decoded at once, cut at the first stop
string.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from typing_extensions import override

Decode = Callable[[Sequence[int]], str]
"""Ids to text, without special tokens."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED_TOKENS = 3
"""A character has at most four bytes, so at most three tokens wait for its last token."""


class TextSource(Protocol):
    """Decodes one answer, in whole characters."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""

    def flush(self) -> str:
        """The rest of the text, after the last token; an unfinished character becomes U+FFFD."""


class TextStream(TextSource):
    """Decodes with the tokenizer's own decoder, which may look at neighbouring tokens.

    It decodes a window that begins at the last place without an unfinished character, so the cost
    of a token does not grow with the answer. Text that was shown is never taken back, although a
    byte-fallback decoder that meets an invalid byte would also replace the characters right before
    it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0
        self._emitted = 0

    @override
    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        end = len(text.rstrip(_REPLACEMENT))
        whole = end == len(text)
        # Byte-level decoders give one U+FFFD for an unfinished character. Byte-fallback decoders
        # give one for each of its bytes, and for those of the whole characters right before it.
        if len(self._window) - self._context > _UNFINISHED_TOKENS:
            end = max(end, len(text) - _UNFINISHED_TOKENS)
        piece = text[self._emitted : end]
        self._emitted += len(piece)
        if whole and text:
            self._slide(text)
        return piece

    @override
    def flush(self) -> str:
        piece = self._decode(self._window)[self._emitted :]
        self._emitted += len(piece)
        return piece

    def _slide(self, text: str) -> None:
        del self._window[: self._context]
        self._context = len(self._window)
        self._emitted = len(self._decode(self._window))


class ByteStream(TextSource):
    """Decodes the bytes of each token; for tokenizers whose text is that of the joined bytes."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @override
    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    @override
    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """Cuts text at the first stop string, and holds back text that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.match: str | None = None
        """The stop string that ended the text; None so far."""

    def push(self, piece: str) -> str:
        """The text that can be shown."""
        if not self._stops:
            return piece
        if self.match is not None:
            return ""
        self._held += piece
        places = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            end, self.match = min(places)
            return self._release(end)
        return self._release(len(self._held) - self._undecided())

    def flush(self) -> str:
        """The rest of the text; call it after the last piece."""
        return "" if self.match is not None else self._release(len(self._held))

    def _release(self, end: int) -> str:
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def _undecided(self) -> int:
        """Length of the longest tail that may begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
