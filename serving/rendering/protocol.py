"""The seam of renderers: conversations to token ids, and sampled ids back to text and calls.

`template_renderer` uses the model's own chat template, `family_renderer` the rules of a model
family; `loading` picks one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from onlinerl.rollout_store.schema import RendererName
from onlinerl.serving.interaction.request import Conversation, Tool, ToolChoice
from onlinerl.serving.parsing.output_parser import OutputParser


def without_markers(prompt: str, markers: Iterable[str]) -> str:
    """A prompt without `markers` and without white space, to compare it with another."""
    for marker in markers:
        prompt = prompt.replace(marker, "")
    return "".join(prompt.split())


class Renderer(Protocol):
    """Conversations to token ids, and sampled ids back to text, reasoning and calls.

    Not thread-safe. Only the renderer makes control tokens: where a caller's text spells one, it is
    tokenized as plain text.
    """

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def longest_token(self) -> int:
        """Most UTF-8 bytes that one token stands for."""

    def name(self, tools: Sequence[Tool]) -> RendererName:
        """The name that is logged, with a hash over rendering rules, tokenizer and `tools`."""

    def render(self, conversation: Conversation) -> list[int]:
        """The prompt for an answer to `conversation`.

        Raises:
            RequestRefused: it cannot be rendered faithfully; the error names the parameter.
        """

    def extend(
        self, conversation: Conversation, *, num_known: int, known_ids: Sequence[int]
    ) -> list[int]:
        """The tokens after `known_ids` in the prompt for an answer to `conversation`.

        Empty if it cannot be proven that the prompt continues so; then render it as a whole.

        Args:
            conversation: All messages, with new ones after the known ones.
            num_known: Number of known messages, at least 1; the last is a sampled answer.
            known_ids: The exact tokens of the known messages. They are kept as they are.
        """

    def is_same_prompt(self, conversation: Conversation, *, thinking: bool | None) -> bool:
        """Whether the prompt stays the same with another switch of reasoning.

        The beginning of the answer does not count. False for templates that write the switch into a
        message: tokens that were served under one switch cannot be extended under another.
        """

    def tokenize(self, text: str) -> list[int]:
        """Ids of a raw prompt; control tokens that it spells become control tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of one token; in the text, bytes that are not UTF-8 are U+FFFD."""

    def parser(
        self,
        conversation: Conversation | None,
        *,
        choice_index: int,
        stops: Sequence[str],
        parse_tools: bool,
    ) -> OutputParser:
        """A parser for one choice of an answer to `conversation`; None stands for a raw prompt."""

    def tool_grammar(
        self, tools: Sequence[Tool], choice: ToolChoice
    ) -> Mapping[str, object] | None:
        """The engine's `structured_outputs` that force valid calls; None if nothing is forced.

        Calls are forced by the choices `required` and a named function, and by `strict` tools.

        Raises:
            RequestRefused: 400, the call markup of this model has no grammar.
        """
