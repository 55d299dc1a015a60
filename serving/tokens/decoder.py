"""Text from token ids, as they come.

The pieces of a stream joined are exactly what decoding all ids at once gives, cut at the
first stop string. Nothing here knows of a protocol.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

Decode = Callable[[Sequence[int]], str]
"""Ids to text; special tokens are skipped."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNFINISHED_TOKENS = 3
"""A character has at most four bytes, so at most three tokens wait for its last one."""


class TextSource(Protocol):
    """Text from ids, whole characters only."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""

    def flush(self) -> str:
        """What is held, when no token follows."""


class TextStream:
    """Incremental decoding: a character that spans several tokens waits for its last one.

    Decodes a window that begins at the last place where the text was whole, so the cost of a
    token does not grow with the answer, and tokenizers that look at their neighbours see one.
    What was shown stays: a byte-fallback decoder that meets an invalid byte would also spoil the
    whole characters right before it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        self._window.append(token_id)
        text = self._decode(self._window)
        end = len(text.rstrip(_REPLACEMENT))
        whole = end == len(text)
        # Byte-level decoders give one U+FFFD for an unfinished character; byte-fallback ones give
        # one for every byte, and for those of whole characters right before it.
        if len(self._window) - self._context > _UNFINISHED_TOKENS:
            end = max(end, len(text) - _UNFINISHED_TOKENS)
        piece = text[self._emitted : end]
        self._emitted += len(piece)
        if whole and text:
            self._slide(text)
        return piece

    def flush(self) -> str:
        """What is held when no token follows: an unfinished character becomes U+FFFD."""
        piece = self._decode(self._window)[self._emitted :]
        self._emitted += len(piece)
        return piece

    def _slide(self, text: str) -> None:
        del self._window[: self._context]
        self._context = len(self._window)
        self._emitted = len(self._decode(self._window))


class ByteStream:
    """Incremental decoding where the text of tokens is that of their bytes, one after the other."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """What is held when no token follows: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """Cuts text at the first stop string and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """The text that is safe to show."""
        if not self._stops:
            return piece
        if self.found is not None:
            return ""
        self._held += piece
        matches = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            end, self.found = min(matches)
            return self._release(end)
        return self._release(len(self._held) - self._undecided())

    def flush(self) -> str:
        """What is held when nothing follows."""
        return "" if self.found is not None else self._release(len(self._held))

    def _release(self, end: int) -> str:
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def _undecided(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
