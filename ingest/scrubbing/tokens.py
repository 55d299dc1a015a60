"""From a span of text to the tokens that hold any of it.

A token is a run of bytes. One character may lie in several tokens and one token may hold several
characters, so spans are carried over in bytes: a token that shares a single byte with a span is
part of it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from onlinerl.errors import ConfigError
from onlinerl.ingest.scrubbing.rules import Span
from onlinerl.ingest.scrubbing.scrubber import merged

TokenBytesOf = Callable[[int], bytes]
"""The bytes that one token stands for."""


class TokenText:
    """The text of a list of tokens, and the way back from its characters to the tokens.

    Bytes that are no UTF-8, such as half a character at an end, are characters of their own.
    """

    def __init__(self, token_ids: Sequence[int], *, bytes_of: TokenBytesOf) -> None:
        self._pieces = list(map(bytes_of, token_ids))
        self.text = b"".join(self._pieces).decode("utf-8", "surrogateescape")

    @cached_property
    def _ends(self) -> list[int]:
        """In bytes, of every token."""
        return list(accumulate(map(len, self._pieces)))

    def tokens_of(self, spans: Iterable[Span]) -> list[Span]:
        """The tokens that hold any byte of these characters, as few spans, in order."""
        wanted = list(spans)
        bytes_at = self._bytes_at({place for span in wanted for place in span})
        in_bytes = ((bytes_at[start], bytes_at[end]) for start, end in wanted)
        return merged(filter(None, map(self._tokens_of, in_bytes)))

    def _bytes_at(self, places: Iterable[int]) -> dict[int, int]:
        """Bytes before each of these characters; there may be many, so none is measured twice."""
        found: dict[int, int] = {}
        before = num_bytes = 0
        for place in sorted(places):
            num_bytes += _num_bytes(self.text[before:place])
            found[place], before = num_bytes, place
        return found

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
    """The bytes of the tokens of a model.

    Args:
        base_model: Folder, or Hugging Face id of a model that is cached on this machine.

    Raises:
        ConfigError: it has no tokenizer here.
    """
    from tokenizers import Tokenizer

    from onlinerl.rollout_store.token_bytes import TokenBytes

    file = _tokenizer_file(base_model)
    return _Known(TokenBytes(Tokenizer.from_file(str(file))).of).__getitem__


class _Known(dict[int, bytes]):
    """The bytes of every token that was asked for; no Python runs for one that is known."""

    def __init__(self, bytes_of: TokenBytesOf) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._bytes_of(token_id)
        return found


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
        f"[scrub] needs the tokenizer of policy.base_model ({base_model!r}): there is no "
        "tokenizer.json; name a folder that has one"
    )
