"""Tokenizers with the control tokens of a family, built in memory: bytes and a few merges."""

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen cut text before they merge; line breaks stay together."""

_TEXT = [
    "You may call one or more functions to assist with the user query.",
    '{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}',
    "system\nuser\nassistant\n\n\nHello there, how are you?\n\n # Tools\n\n",
]


def small_tokenizer(control: Sequence[str], *, plain: Sequence[str] = ()) -> Tokenizer:
    """A byte-level tokenizer; `control` tokens are special, `plain` ones atomic but not special."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=360,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in control])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return tokenizer
