"""From a span of text to the tokens that hold any of it.

A token is a run of bytes. One character may lie in several tokens and one token may hold several
characters, so spans are carried over in bytes: a token that shares a single byte with a span is
part of it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from onlinerl.errors import ConfigError
from onlinerl.ingest.scrub_rules import Span
from onlinerl.ingest.scrubber import merged

TokenBytesOf = Callable[[int], bytes]
"""The bytes that one token stands for."""


class TokenText:
    """The text of a list of tokens, and the way back from its characters to the tokens.

    Bytes that are no UTF-8, such as half a character at an end, are characters of their own.
    """

    def __init__(self, token_ids: Sequence[int], *, bytes_of: TokenBytesOf) -> None:
        pieces = [bytes_of(token_id) for token_id in token_ids]
        self._ends = list(accumulate(map(len, pieces)))
        self.text = b"".join(pieces).decode("utf-8", "surrogateescape")

    def tokens_of(self, spans: Iterable[Span]) -> list[Span]:
        """The tokens that hold any byte of these characters, as few spans, in order."""
        return merged(filter(None, map(self._tokens_of, spans)))

    def _tokens_of(self, span: Span) -> Span | None:
        start, end = (_num_bytes(self.text[:place]) for place in span)
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
    known = TokenBytes(Tokenizer.from_file(str(file)))
    cache: dict[int, bytes] = {}

    def bytes_of(token_id: int) -> bytes:
        found = cache.get(token_id)
        if found is None:
            found = cache[token_id] = known.of(token_id)
        return found

    return bytes_of


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
