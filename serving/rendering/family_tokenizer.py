"""A tokenizer with the interface that `renderers` expects, without transformers and torch."""

from collections.abc import Sequence

from onlinerl.serving.tokens.codec import TokenCodec


class FamilyTokenizer:
    """The methods of transformers' tokenizers that renderers of text use.

    `TokenCodec.control` hides control tokens that a caller spells before a renderer sees the text;
    encoding brings them back as plain text.
    """

    def __init__(
        self, codec: TokenCodec, *, source: str, template: str, eos_token_id: int | None
    ) -> None:
        self._codec = codec
        self.name_or_path = source
        self.chat_template = template
        self.unk_token_id: int | None = None
        self.eos_token_id = eos_token_id

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; renderers never want special tokens around it."""
        assert not add_special_tokens
        return self._codec.encode(text)

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Text of `token_ids`."""
        del clean_up_tokenization_spaces
        return (
            self._codec.decode(token_ids)
            if skip_special_tokens
            else self._codec.decode_all(token_ids)
        )

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of one token; None if it is not in the vocabulary."""
        token_id: int | None = self._codec.tokenizer.token_to_id(token)
        return token_id


class OffsetTokenizer(FamilyTokenizer):
    """For renderers that would otherwise find the places of tokens by decoding them one by one."""

    def __call__(
        self, text: str, add_special_tokens: bool = False, return_offsets_mapping: bool = True
    ) -> dict[str, list[int] | list[tuple[int, int]]]:
        """Ids and their places in `text`; every place is (0, 0) if `text` hides something."""
        assert return_offsets_mapping
        assert not add_special_tokens
        if self._codec.control.holds_marks(text):
            ids = self._codec.encode(text)
            return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}
        encoding = self._codec.tokenizer.encode(text, add_special_tokens=False)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}
