"""A tokenizer as renderers use it: prompts to ids, and ids to text."""

import hashlib
import json
from collections.abc import Sequence

from tokenizers import Tokenizer

from onlinerl.rollout_store.schema import RendererName
from onlinerl.rollout_store.token_bytes import TokenBytes
from onlinerl.serving.interaction.request import Tool
from onlinerl.serving.tokens.control_tokens import ControlTokens
from onlinerl.serving.tokens.decoder import ByteStream, TextSource, TextStream


class TokenCodec:
    """Wraps one `Tokenizer`. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added = {token.content: token_id for token_id, token in added.items()}
        """Ids of all added tokens, which no merge produces, by their text."""
        self.special = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        """Ids of the control tokens by their text."""
        self.control = ControlTokens(self.special)
        vocabulary = tokenizer.get_vocab()
        self.longest_token = max(len(token.encode()) for token in vocabulary)
        """Bytes of the longest entry of the vocabulary, as the vocabulary spells it."""
        self._bytes = TokenBytes(tokenizer)
        self._special_ids = frozenset(self.special.values())
        self._visible_bytes: dict[int, bytes] = {}
        """A cache with at most one entry per token of the vocabulary."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, control tokens included."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt, in which the marks of `control` become plain text.

        Raises:
            RequestRefused: a mark was cut or changed.
        """
        if not self.control.holds_marks(text):
            return self.tokenize(text)
        ids: list[int] = []
        start = 0
        for match in self.control.pattern.finditer(text):
            ids += self._encode_plain(text[start : match.start()])
            ids.append(self.special[match[0]])
            start = match.end()
        return ids + self._encode_plain(text[start:])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without control tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, control tokens included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def text_source(self) -> TextSource:
        """A decoder for one answer."""
        return (
            ByteStream(self._visible) if self._bytes.is_concatenative else TextStream(self.decode)
        )

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of one token; in the text, bytes that are not UTF-8 are U+FFFD."""
        token_bytes = self._bytes.of(token_id)
        return token_bytes.decode(errors="replace"), token_bytes

    def _visible(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for control tokens."""
        visible = self._visible_bytes.get(token_id)
        if visible is None:
            visible = b"" if token_id in self._special_ids else self._bytes.in_text(token_id)
            self._visible_bytes[token_id] = visible
        return visible

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        self.tokenizer.encode_special_tokens = True
        try:
            return self.tokenize(self.control.restore(text))
        finally:
            self.tokenizer.encode_special_tokens = False


class RendererHash:
    """Name of a renderer, with a hash over its rules and the tools of a request.

    Args:
        name: Name of the renderer.
        sources: Texts that decide how messages become tokens.
    """

    def __init__(self, name: str, *sources: str) -> None:
        self._name = name
        self._digest = hashlib.sha256()
        for source in sources:
            content = source.encode()
            self._digest.update(len(content).to_bytes(8, "big") + content)

    def with_tools(self, tools: Sequence[Tool]) -> RendererName:
        """The name with a hash over everything that a prompt depends on except its messages."""
        digest = self._digest.copy()
        if tools:
            digest.update(json.dumps([vars(tool) for tool in tools], sort_keys=True).encode())
        return RendererName(name=self._name, hash=digest.hexdigest())
