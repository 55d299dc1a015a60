"""Tokens back to text and to messages, for export. What scrubbing masked never becomes text.

Messages are not logged, tokens are. So messages are read back from the ChatML markers in the text,
and only where the whole text is made of them; nothing is guessed.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from onlinerl.errors import ConfigError

MASKED_TEXT = "[masked]"
"""Stands for a run of masked tokens."""

Message = dict[str, str]
"""`role` and `content`, as chat templates take them."""

_MESSAGE = re.compile(r"<\|im_start\|>([^\n<]+)\n(.*?)<\|im_end\|>\n?", re.DOTALL)
_TURN = "<|im_start|>assistant\n"
_END = "<|im_end|>"


class Decoder(Protocol):
    """Turns token ids into text, special tokens included."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of these ids."""
        ...


def load_decoder(tokenizer: str) -> Decoder:
    """The `tokenizer.json` of a model folder, or one such file.

    Raises:
        ConfigError: there is none.
    """
    from tokenizers import Tokenizer

    place = Path(tokenizer).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    if not tokenizer or not file.is_file():
        raise ConfigError(
            f"there is no tokenizer.json at {tokenizer!r}, which text is decoded with; name a "
            "model folder with --tokenizer"
        )
    decoder: Decoder = Tokenizer.from_file(str(file))
    return decoder


def text_of(decoder: Decoder, ids: Sequence[int], masked: Sequence[int]) -> str:
    """The text of tokens, with `MASKED_TEXT` for each run of masked ones."""
    parts = []
    for is_masked, run in groupby(zip(ids, masked, strict=True), key=lambda pair: bool(pair[1])):
        kept = [token for token, _ in run]
        parts.append(MASKED_TEXT if is_masked else decoder.decode(kept, skip_special_tokens=False))
    return "".join(parts)


def messages_of(prompt: str) -> list[Message] | None:
    """The messages of a ChatML prompt that ends with the opening of the answer; else None."""
    if not prompt.endswith(_TURN):
        return None
    found, at = [], 0
    body = prompt.removesuffix(_TURN)
    for match in _MESSAGE.finditer(body):
        if match.start() != at:
            return None
        found.append({"role": match[1], "content": match[2]})
        at = match.end()
    return found if found and at == len(body) else None


def answer_of(completion: str) -> str:
    """The content of a ChatML answer: its text without the marker that ends it."""
    return completion.removesuffix("\n").removesuffix(_END)
