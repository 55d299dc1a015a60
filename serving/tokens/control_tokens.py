"""Keeps the control tokens that a caller spells apart from those that a template makes.

What a caller wrote is `hide`d before a template or a renderer sees it: every spelling of a control
token becomes a mark that no caller can guess. When the prompt is tokenized, `TokenCodec` turns the
marks back into plain text.
"""

import re
import secrets
from collections.abc import Iterable, Sequence

from onlinerl.errors import RequestRefused
from onlinerl.serving.encoding.json import unescaped_json


class ControlTokens:
    """The control tokens of one tokenizer, and marks for their spellings.

    Marks are private-use characters around digits, so that trimming, changing case and JSON
    leave them alone.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts: Sequence[str] = sorted(texts, key=lambda text: (-len(text), text))
        self._index = {text: number for number, text in enumerate(self._texts)}
        self.spelled = _any_of(self._texts)
        """Matches the spelling of a control token; of several that begin together the longest."""
        self._spelled_in_json = _any_of([unescaped_json(text)[1:-1] for text in self._texts])
        self._nonce = str(secrets.randbits(96))
        self._marked = re.compile(f"\ue000{self._nonce}\ue002([0-9]+)\ue001")
        # As it is, or as `repr` and JSON write it.
        opens, splits, closes = (rf"(?:\u{code}|\\u{code})" for code in ("e000", "e002", "e001"))
        self._quoted = re.compile(f"{opens}{self._nonce}{splits}([0-9]+){closes}")

    def hide(self, text: str) -> str:
        """`text` with marks for the control tokens that it spells."""
        return self.spelled.sub(self._mark, text)

    def hide_all(self, value: object) -> object:
        """The same for every text within a JSON value, keys included."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide_all(item) for key, item in value.items()}
        return [self.hide_all(item) for item in value] if isinstance(value, list) else value

    def hide_json(self, value: object) -> object:
        """`hide_all`, without a copy in the usual case that there is nothing to hide."""
        return (
            self.hide_all(value) if self._spelled_in_json.search(unescaped_json(value)) else value
        )

    def holds_marks(self, text: str) -> bool:
        """Whether something is hidden in `text`."""
        return self._nonce in text

    def restore(self, text: str) -> str:
        """`text` with spellings for marks.

        Raises:
            RequestRefused: when a mark was cut or changed, so that what it hides cannot be told.
        """
        text = self._marked.sub(self._spelling, text)
        if self._nonce in text:
            raise RequestRefused(
                "a message holds a control token of the model where the template rewrites text: "
                "leave it out",
                param="messages",
            )
        return text

    def spell(self, message: str) -> str:
        """A message that may quote what was hidden, for the caller who wrote that."""
        return self._quoted.sub(self._spelling, message)

    def _spelling(self, match: re.Match[str]) -> str:
        return self._texts[int(match[1])]

    def _mark(self, match: re.Match[str]) -> str:
        return f"\ue000{self._nonce}\ue002{self._index[match[0]]}\ue001"


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    # Without control tokens, a pattern that matches nothing.
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
