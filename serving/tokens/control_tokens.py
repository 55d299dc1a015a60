"""Prevents callers from injecting control tokens: where a text spells one, it stays plain text.

`hide` replaces every spelling of a control token in a caller's text with a mark that no caller can
guess, before a template or a renderer sees the text. When the prompt is tokenized, `TokenCodec`
turns the marks back into plain text.
"""

import re
import secrets
from collections.abc import Iterable, Sequence

from onlinerl.errors import RequestRefused
from onlinerl.serving.encoding.json import unescaped_json


class ControlTokens:
    """The control tokens of one tokenizer, and the marks that stand for their spellings.

    Marks are private-use characters around digits, which survive trimming, changes of case and
    JSON.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts: Sequence[str] = sorted(texts, key=lambda text: (-len(text), text))
        self._index = {text: number for number, text in enumerate(self._texts)}
        self.pattern = _any_of(self._texts)
        """Matches the spelling of a control token; the longest of those that begin together."""
        self._json_pattern = _any_of([unescaped_json(text)[1:-1] for text in self._texts])
        self._nonce = str(secrets.randbits(96))
        self._marked = re.compile(f"\ue000{self._nonce}\ue002([0-9]+)\ue001")
        # The mark itself, or its escapes in `repr` and JSON.
        opens, splits, closes = (rf"(?:\u{code}|\\u{code})" for code in ("e000", "e002", "e001"))
        self._quoted = re.compile(f"{opens}{self._nonce}{splits}([0-9]+){closes}")

    def hide(self, text: str) -> str:
        """`text` with its control tokens replaced by marks."""
        return self.pattern.sub(self._mark, text)

    def hide_all(self, value: object) -> object:
        """A JSON value with `hide` applied to every string in it, keys included."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide_all(item) for key, item in value.items()}
        return [self.hide_all(item) for item in value] if isinstance(value, list) else value

    def hide_json(self, value: object) -> object:
        """The same as `hide_all`, but without a copy if there is nothing to hide."""
        return self.hide_all(value) if self._json_pattern.search(unescaped_json(value)) else value

    def holds_marks(self, text: str) -> bool:
        """Whether `text` holds marks."""
        return self._nonce in text

    def restore(self, text: str) -> str:
        """`text` with its marks replaced by the control tokens that they stand for.

        Raises:
            RequestRefused: the template cut or changed a mark, so it cannot be replaced.
        """
        text = self._marked.sub(self._spelling, text)
        if self._nonce in text:
            raise RequestRefused(
                "a message holds a control token of the model in text that the chat template "
                "rewrites: leave it out",
                param="messages",
            )
        return text

    def spell(self, message: str) -> str:
        """An error message with the marks that it may quote replaced, to show it to the caller."""
        return self._quoted.sub(self._spelling, message)

    def _spelling(self, match: re.Match[str]) -> str:
        return self._texts[int(match[1])]

    def _mark(self, match: re.Match[str]) -> str:
        return f"\ue000{self._nonce}\ue002{self._index[match[0]]}\ue001"


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    # `(?!)` matches nothing: for a tokenizer without control tokens.
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
