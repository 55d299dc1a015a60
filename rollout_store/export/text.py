"""Turns tokens back into text and messages, for export. Masked tokens never become text.

Only tokens are logged, not messages. So messages are read from the ChatML markers in the decoded
text, and only if the whole text consists of ChatML messages; nothing is guessed.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from onlinerl.errors import ConfigError

MASKED_TEXT = "[masked]"
"""Replaces each run of masked tokens."""

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
        ConfigError: there is no such file.
    """
    from tokenizers import Tokenizer

    place = Path(tokenizer).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    if not tokenizer or not file.is_file():
        raise ConfigError(
            f"there is no tokenizer.json at {tokenizer!r} to decode text with; name a model folder "
            "with --tokenizer"
        )
    decoder: Decoder = Tokenizer.from_file(str(file))
    return decoder


def text_of(decoder: Decoder, ids: Sequence[int], masked: Sequence[int]) -> str:
    """The text of the tokens, with `MASKED_TEXT` in place of each run of masked tokens."""
    parts = []
    for is_masked, run in groupby(zip(ids, masked, strict=True), key=lambda pair: bool(pair[1])):
        ids_of_run = [token for token, _ in run]
        parts.append(
            MASKED_TEXT if is_masked else decoder.decode(ids_of_run, skip_special_tokens=False)
        )
    return "".join(parts)


def messages_of(prompt: str) -> list[Message] | None:
    """The messages of a ChatML prompt that ends where the answer begins; None for other prompts."""
    if not prompt.endswith(_TURN):
        return None
    messages, at = [], 0
    body = prompt.removesuffix(_TURN)
    for match in _MESSAGE.finditer(body):
        if match.start() != at:
            return None
        messages.append({"role": match[1], "content": match[2]})
        at = match.end()
    return messages if messages and at == len(body) else None


def answer_of(completion: str) -> str:
    """The content of a ChatML answer: its text without the end marker."""
    return completion.removesuffix("\n").removesuffix(_END)
