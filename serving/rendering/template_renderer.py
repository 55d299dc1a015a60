"""The `Renderer` that uses a model's own chat template.

A conversation is rendered as a whole once. Its later turns extend the exact tokens that were
served, so that sampled text is never tokenized a second time.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from typing_extensions import override

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.serving.interaction.request import Conversation, Message, Tool, ToolChoice
from onlinerl.serving.parsing import hermes
from onlinerl.serving.parsing.hermes_splitter import HermesSplitter
from onlinerl.serving.parsing.output_parser import AnswerParser, PlainSplitter, Splitter
from onlinerl.serving.parsing.tagged_text import AnswerFeatures
from onlinerl.serving.rendering.chat_template import ModelText
from onlinerl.serving.rendering.model_renderer import ModelRenderer
from onlinerl.serving.rendering.protocol import without_markers
from onlinerl.serving.rendering.template_messages import (
    TemplateMessage,
    hermes_messages,
    hidden_specs,
    native_messages,
)
from onlinerl.serving.rendering.tool_grammar import HERMES, call_grammar
from onlinerl.serving.tokens.codec import RendererHash

Kind = Literal["chatml", "chat_template"]

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class TemplateRenderer(ModelRenderer):
    """Renders through a chat template, and reads answers with calls in the form of Hermes.

    `chatml` describes tools in the system message if the template cannot; `chat_template` takes
    tools only if the template writes calls in the form of Hermes.

    Raises:
        ConfigError: the model has no chat template, or no ChatML token for `chatml`.
    """

    def __init__(self, text: ModelText, *, kind: Kind = "chat_template") -> None:
        if text.template is None:
            raise ConfigError(
                "the model has no chat template: set [gateway].tokenizer to a folder that has one, "
                "or [gateway].renderer to the model's family"
            )
        source = text.template.source
        super().__init__(text, rules=RendererHash(kind, source, text.tokenizer.to_str()))
        self._template = text.template
        self._native_tools = text.template.reads_tools
        self._takes_tools = kind == "chatml" or (self._native_tools and hermes.CALL_OPEN in source)
        self._reasons = THINK_OPEN in source
        self._opens: dict[bool | None, bool] = {}
        if kind == "chatml" and "<|im_start|>" not in self._codec.special:
            raise ConfigError(
                "[gateway].renderer is 'chatml', but the tokenizer has no control token "
                "<|im_start|>: use 'auto' or 'chat_template'"
            )
        self._end_ids |= self._closing_ids()

    @override
    def render(self, conversation: Conversation) -> list[int]:
        return self._codec.encode(self._text(conversation))

    @override
    def extend(
        self, conversation: Conversation, *, num_known: int, known_ids: Sequence[int]
    ) -> list[int]:
        """The tokens after `known_ids`, which end with the answer `messages[num_known - 1]`.

        They are the text after that answer in the whole rendered conversation, so the boundary is
        the template's own. Sampled reasoning stays in the history, even if the template would drop
        it. Empty if the template now renders the turns before the answer otherwise, or if the
        answer was cut within its reasoning.
        """
        rest = self._rest(conversation, num_known)
        if rest is None or self._ended_thinking(conversation.messages[num_known - 1], known_ids):
            return []
        ids = self._codec.encode(rest)
        last_id = known_ids[-1]
        if last_id not in self._end_ids:
            return ids
        return ids[1:] if ids[:1] == [last_id] else []

    @override
    def is_same_prompt(self, conversation: Conversation, *, thinking: bool | None) -> bool:
        try:
            prompts = [
                self._text(conversation),
                self._text(replace(conversation, thinking=thinking)),
            ]
        except RequestRefused:
            return False
        one, other = (without_markers(text, (THINK_OPEN, THINK_CLOSE)) for text in prompts)
        return one == other

    @override
    def decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)

    @override
    def parser(
        self,
        conversation: Conversation | None,
        *,
        choice_index: int,
        stops: Sequence[str],
        parse_tools: bool,
    ) -> AnswerParser:
        tools = conversation is not None and parse_tools and bool(conversation.tools)
        splitter: Splitter = PlainSplitter()
        if conversation is not None and (self._reasons or tools):
            opened = self._reasons and self._opens_reasoning(conversation.thinking)
            splitter = HermesSplitter(
                AnswerFeatures(reasoning=self._reasons, starts_reasoning=opened, tools=tools)
            )
        source = self._codec.text_source()
        return AnswerParser(source, splitter, choice_index=choice_index, stops=stops)

    @override
    def tool_grammar(
        self, tools: Sequence[Tool], choice: ToolChoice
    ) -> Mapping[str, object] | None:
        return call_grammar(HERMES, tools, choice, tokens=self._codec.added)

    def _text(self, conversation: Conversation) -> str:
        tools = hidden_specs(conversation.tools, self._codec.control)
        if tools and not self._takes_tools:
            raise RequestRefused(
                "the chat template of this model has no form for tool calls: "
                "set [gateway].renderer to the model's family or to 'chatml'",
                param="tools",
            )
        self._refuse_thinking(conversation.thinking)
        return self._template.render(
            self._messages(conversation),
            tools=tools if self._native_tools else None,
            thinking=conversation.thinking,
        )

    def _refuse_thinking(self, thinking: bool | None) -> None:
        """Refuse a switch of reasoning that the template does not have."""
        if thinking and not self._reasons:
            raise RequestRefused("this model does not reason", param="thinking")
        is_known = thinking is None or self._template.reads_thinking or not self._reasons
        if not is_known and not thinking and self._opens_reasoning(None):
            raise RequestRefused("reasoning of this model cannot be switched off", param="thinking")

    def _messages(self, conversation: Conversation) -> list[TemplateMessage]:
        if self._native_tools or not self._takes_tools:
            return native_messages(conversation.messages, self._codec.control)
        return hermes_messages(conversation, conversation.messages, self._codec.control)

    def _rest(self, conversation: Conversation, num_known: int) -> str | None:
        """The rendered text after an answer; None if the text before it was rendered otherwise."""
        mark = f"mark{secrets.token_hex(16)}"
        known = [replace(message, reasoning=None) for message in conversation.messages[:num_known]]
        marked = Message(role="assistant", content=mark)
        new = conversation.messages[num_known:]
        try:
            whole = self._text(replace(conversation, messages=(*known[:-1], marked, *new)))
            prompt = self._text(replace(conversation, messages=tuple(known[:-1])))
        except RequestRefused:
            return None
        before, found_mark, rest = whole.partition(mark)
        is_same = before == prompt or (
            self._reasons and _without_reasoning(before) == _without_reasoning(prompt)
        )
        return rest if found_mark and is_same else None

    def _ended_thinking(self, answer: Message, known_ids: Sequence[int]) -> bool:
        """Whether an answer was cut within its reasoning, which the template would not close."""
        # The ids decide: the caller may have left the reasoning out.
        if answer.content or answer.tool_calls:
            return False
        text = self._codec.decode_all(known_ids)
        return text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)

    def _opens_reasoning(self, thinking: bool | None) -> bool:
        """Whether prompts end within reasoning."""
        if thinking not in self._opens:
            probe = Conversation(messages=(Message(role="user", content="x"),), thinking=thinking)
            self._opens[thinking] = self._text(probe).rstrip().endswith(THINK_OPEN)
        return self._opens[thinking]

    def _closing_ids(self) -> frozenset[int]:
        """The control token that the template writes after an answer; empty if it writes none."""
        question = Message(role="user", content="x")
        probe = Conversation(messages=(question, Message(role="assistant", content="x"), question))
        rest = self._rest(probe, 2) or ""
        ids = self._codec.encode(rest)[:1]
        return frozenset(ids) & frozenset(self._codec.special.values())


def _without_reasoning(prompt: str) -> str:
    """A prompt without the markers of reasoning at its end."""
    prompt = prompt.rstrip()
    for marker in (THINK_CLOSE, THINK_OPEN):
        prompt = prompt.removesuffix(marker).rstrip()
    return prompt
