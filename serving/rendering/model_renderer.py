"""The base of all renderers: one model's tokenizer, end tokens and hash."""

from collections.abc import Sequence

from typing_extensions import override

from onlinerl.rollout_store.schema import RendererName
from onlinerl.serving.interaction.request import Tool
from onlinerl.serving.rendering.chat_template import ModelText
from onlinerl.serving.rendering.protocol import Renderer
from onlinerl.serving.tokens.codec import RendererHash, TokenCodec


class ModelRenderer(Renderer):
    """The methods that all renderers share. A subclass adds its own end tokens to `_end_ids`.

    Args:
        text: Tokenizer, template and end tokens of the model.
        rules: Hash over everything that decides how messages become tokens, beside the tools.
    """

    def __init__(self, text: ModelText, *, rules: RendererHash) -> None:
        self._codec = TokenCodec(text.tokenizer)
        self._rules = rules
        self._end_ids = text.end_ids

    @property
    @override
    def end_ids(self) -> frozenset[int]:
        return self._end_ids

    @property
    @override
    def longest_token(self) -> int:
        return self._codec.longest_token

    @override
    def name(self, tools: Sequence[Tool]) -> RendererName:
        return self._rules.with_tools(tools)

    @override
    def tokenize(self, text: str) -> list[int]:
        return self._codec.tokenize(text)

    @override
    def token_text(self, token_id: int) -> tuple[str, bytes]:
        return self._codec.token_text(token_id)
