"""Finds the tokens that hold any part of a span of text.

A token is a run of bytes. One character may lie in several tokens, and one token may hold several
characters. So spans are converted to bytes: a token that shares a byte with a span belongs to it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from onlinerl.errors import ConfigError
from onlinerl.ingest.scrubbing.rules import Span
from onlinerl.ingest.scrubbing.scrubber import merge_spans

TokenBytesOf = Callable[[int], bytes]
"""Returns the bytes that a token id stands for."""


class TokenText:
    """The text of a list of tokens, which maps spans of characters back to tokens.

    A byte that is not UTF-8, such as half a character at an end, becomes a character of its own.

    Args:
        token_ids: The tokens.
        bytes_of: Bytes of a token.
    """

    def __init__(self, token_ids: Sequence[int], *, bytes_of: TokenBytesOf) -> None:
        self._pieces = list(map(bytes_of, token_ids))
        self.text = b"".join(self._pieces).decode("utf-8", "surrogateescape")

    @cached_property
    def _ends(self) -> list[int]:
        """Position in bytes after each token."""
        return list(accumulate(map(len, self._pieces)))

    def tokens_of(self, spans: Iterable[Span]) -> list[Span]:
        """The tokens that hold any byte of these characters, in order and in as few spans."""
        spans = list(spans)
        bytes_at = self._bytes_at({place for span in spans for place in span})
        in_bytes = ((bytes_at[start], bytes_at[end]) for start, end in spans)
        return merge_spans(filter(None, map(self._tokens_of, in_bytes)))

    def _bytes_at(self, places: Iterable[int]) -> dict[int, int]:
        """Number of bytes before each of these characters, in one pass over the text."""
        bytes_at: dict[int, int] = {}
        before = num_bytes = 0
        for place in sorted(places):
            num_bytes += _num_bytes(self.text[before:place])
            bytes_at[place], before = num_bytes, place
        return bytes_at

    def _tokens_of(self, in_bytes: Span) -> Span | None:
        start, end = in_bytes
        if start >= end:
            return None
        first = bisect_right(self._ends, start)
        last = bisect_left(self._ends, end)
        return first, last + 1


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def open_token_bytes(base_model: str) -> TokenBytesOf:
    """Returns the bytes of a model's tokens.

    Args:
        base_model: Folder, or Hugging Face id of a model that is cached on this machine.

    Raises:
        ConfigError: There is no tokenizer of this model on this machine.
    """
    from tokenizers import Tokenizer

    from onlinerl.rollout_store.token_bytes import TokenBytes

    file = _tokenizer_file(base_model)
    return _TokenBytesCache(TokenBytes(Tokenizer.from_file(str(file))).of).__getitem__


class _TokenBytesCache(dict[int, bytes]):
    """Bytes by token id. A dict, so that no Python code runs for a token that it has."""

    def __init__(self, bytes_of: TokenBytesOf) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        token_bytes = self[token_id] = self._bytes_of(token_id)
        return token_bytes


def _tokenizer_file(base_model: str) -> Path:
    local = Path(base_model) / "tokenizer.json"
    if base_model and local.is_file():
        return local
    if base_model and not Path(base_model).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(base_model, "tokenizer.json")
        if isinstance(cached, str):
            return Path(cached)
    raise ConfigError(
        f"[scrub] needs the tokenizer of policy.base_model ({base_model!r}), but there is no "
        "tokenizer.json; set it to a folder that has one"
    )
