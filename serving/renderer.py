"""Messages to token ids, through the model's own chat template.

A conversation is rendered whole once; its later turns extend the exact tokens that were served,
so that what the model sampled is never tokenized a second time.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Renderer as RendererName
from onlinerl.serving.chat_template import ModelText

Message = Mapping[str, str]
"""`role` and `content`."""


class Renderer(Protocol):
    """Both directions between what a caller reads and what the engine computes."""

    @property
    def name(self) -> RendererName:
        """What is logged with every interaction."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def longest_token(self) -> int:
        """Upper bound of the UTF-8 bytes that one token stands for."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The prompt for an answer to `messages`."""

    def extend(self, messages: Sequence[Message], *, num_known: int, last_id: int) -> list[int]:
        """What follows the tokens of `messages[:num_known]`; empty when it cannot be proven."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""


@dataclass(frozen=True)
class _Piece:
    """Text of a prompt; `literal` is the template's own, where control tokens count."""

    text: str
    literal: bool


class TemplateRenderer:
    """The `Renderer` of a model folder.

    Control tokens are only ever made by the template: text of a caller that spells one is
    tokenized as plain text.
    """

    def __init__(self, text: ModelText) -> None:
        self._tokenizer = text.tokenizer
        self._template = text.template
        self._end_ids = text.end_ids
        self._special = {
            token.content: token_id
            for token_id, token in text.tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._longest_token = max(len(token.encode()) for token in text.tokenizer.get_vocab())
        digest = hashlib.sha256(text.template.source.encode())
        digest.update(text.tokenizer.to_str().encode())
        self._name = RendererName(name="chat_template", hash=digest.hexdigest())

    @property
    def name(self) -> RendererName:
        """Template and tokenizer, hashed together."""
        return self._name

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._end_ids

    @property
    def longest_token(self) -> int:
        """Bytes of the longest entry of the vocabulary; none of its spellings is shorter."""
        return self._longest_token

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The prompt for an answer to `messages`.

        Raises:
            RequestRefused: when the template does, or when a message spells a control token that
                cannot be told from the template's own.
        """
        return self._encode(self._template.render(messages), messages)

    def extend(self, messages: Sequence[Message], *, num_known: int, last_id: int) -> list[int]:
        """What follows the tokens of `messages[:num_known]`, the last of which is an answer.

        The text after that answer is cut from the whole rendered conversation, so boundary tokens
        are the template's. Empty when the template rewrites earlier turns, for then the known
        tokens are not a prefix of what it would render.
        """
        prompt = self._template.render(messages[: num_known - 1])
        whole = self._template.render(messages)
        known = prompt + messages[num_known - 1]["content"]
        if not whole.startswith(known):
            return []
        ids = self._encode(whole[len(known) :], messages, num_known=num_known)
        if last_id not in self._end_ids:
            return ids
        return ids[1:] if ids[:1] == [last_id] else []

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text on its own, control tokens included."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _encode(self, text: str, messages: Sequence[Message], *, num_known: int = 0) -> list[int]:
        """Ids of `text`, which is what was rendered after the first `num_known` messages."""
        new = messages[num_known:]
        if not any(token in message["content"] for message in new for token in self._special):
            return self.tokenize(text)
        pieces = self._pieces(messages)[2 * num_known :]
        if "".join(piece.text for piece in pieces) != text:
            raise RequestRefused("a message holds a control token of the model", param="messages")
        return self._encode_pieces(pieces)

    def _pieces(self, messages: Sequence[Message]) -> list[_Piece]:
        """The rendered prompt, cut into the template's own text and the contents, in turn.

        Rendering marks in place of the contents shows what is the template's own; the caller
        cannot guess the marks.
        """
        marks = [f"mark-{secrets.token_hex(16)}-" for _ in messages]
        rest = self._template.render(
            [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        )
        pieces: list[_Piece] = []
        for message, mark in zip(messages, marks, strict=True):
            before, _, rest = rest.partition(mark)
            pieces += [_Piece(before, literal=True), _Piece(message["content"], literal=False)]
        return [*pieces, _Piece(rest, literal=True)]

    def _encode_pieces(self, pieces: Sequence[_Piece]) -> list[int]:
        """Tokenize with control tokens taken from literal pieces only."""
        ids: list[int] = []
        plain = ""
        for piece in pieces:
            rest = piece.text
            while piece.literal and (found := self._first_special(rest)) is not None:
                at, token = found
                ids += self._encode_plain(plain + rest[:at])
                ids.append(self._special[token])
                plain, rest = "", rest[at + len(token) :]
            plain += rest
        return ids + self._encode_plain(plain)

    def _first_special(self, text: str) -> tuple[int, str] | None:
        found = [
            (at, -len(token), token) for token in self._special if (at := text.find(token)) >= 0
        ]
        if not found:
            return None
        at, _, token = min(found)
        return at, token

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        self._tokenizer.encode_special_tokens = True
        try:
            return self.tokenize(text)
        finally:
            self._tokenizer.encode_special_tokens = False
