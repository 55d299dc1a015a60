"""Both directions between what a caller reads and what an engine computes: the seam.

`template_renderer` goes through the model's own chat template, `family_renderer` through the
renderer of a model family; `renderer_choice` picks one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from onlinerl.rollout_store.schema import RendererName
from onlinerl.serving.interaction.request import Conversation, Tool, ToolChoice
from onlinerl.serving.parsing.output_parser import OutputParser


def beside_reasoning(prompt: str, markers: Iterable[str]) -> str:
    """What a prompt says without markers of reasoning, and without the space around them."""
    for marker in markers:
        prompt = prompt.replace(marker, "")
    return "".join(prompt.split())


class Renderer(Protocol):
    """Conversations to token ids, and sampled ids back to what a caller sees.

    Used from one thread. Control tokens are only ever made by the renderer: text of a caller that
    spells one is tokenized as plain text.
    """

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def longest_token(self) -> int:
        """Upper bound of the UTF-8 bytes that one token stands for."""

    def name(self, tools: Sequence[Tool]) -> RendererName:
        """What is logged: the name, and a hash over template, tokenizer and `tools`."""

    def render(self, conversation: Conversation) -> list[int]:
        """The prompt for an answer to `conversation`.

        Raises:
            RequestRefused: when it cannot be rendered faithfully; names the parameter.
        """

    def extend(
        self, conversation: Conversation, *, num_known: int, known_ids: Sequence[int]
    ) -> list[int]:
        """What follows `known_ids`, the exact tokens of the first `num_known` messages.

        The last of them is an answer that was sampled, at least 1 of `num_known`. Known tokens are
        kept as they are. Empty when it cannot be proven that the prompt goes on so.
        """

    def is_told_alike(self, conversation: Conversation, *, thinking: bool | None) -> bool:
        """Whether a prompt says the same under another switch of reasoning.

        How answers begin does not count. Some templates write the switch into a message as well:
        tokens that were served under one then ask for something else than those of another.
        """

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text on its own, control tokens included: for raw prompts."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of one token; bytes that are no UTF-8 show as U+FFFD."""

    def parser(
        self,
        conversation: Conversation | None,
        *,
        choice_index: int,
        stops: Sequence[str],
        parse_tools: bool,
    ) -> OutputParser:
        """A parser for one choice of an answer to `conversation`; None is a raw prompt."""

    def tool_grammar(
        self, tools: Sequence[Tool], choice: ToolChoice
    ) -> Mapping[str, object] | None:
        """The engine's `structured_outputs` that force call markup; None when nothing is forced.

        Forced are `required` and named choices, and calls when a tool is `strict`.

        Raises:
            RequestRefused: 400 on `tool_choice` when this model's call markup has no grammar.
        """
