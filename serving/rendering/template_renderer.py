"""The `Renderer` of a model folder: its own chat template.

A conversation is rendered whole once; its later turns extend the exact tokens that were served,
so that what the model sampled is never tokenized a second time.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.rollout_store.schema import RendererName
from onlinerl.serving.interaction.request import Conversation, Message, Tool, ToolChoice
from onlinerl.serving.parsing import hermes
from onlinerl.serving.parsing.hermes_splitter import HermesSplitter
from onlinerl.serving.parsing.output_parser import AnswerParser, PlainSplitter, Splitter
from onlinerl.serving.parsing.tagged_text import Expected
from onlinerl.serving.rendering.chat_template import ModelText
from onlinerl.serving.rendering.protocol import beside_reasoning
from onlinerl.serving.rendering.template_messages import (
    TemplateMessage,
    hermes_messages,
    hidden_specs,
    native_messages,
)
from onlinerl.serving.rendering.tool_grammar import HERMES, call_grammar
from onlinerl.serving.tokens.codec import NameTag, TokenCodec

Kind = Literal["chatml", "chat_template"]

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class TemplateRenderer:
    """Renders through a chat template, and reads answers in the form of Hermes.

    `chatml` describes tools in the system message where the template does not know any;
    `chat_template` takes tools only where the template writes calls in the form of Hermes.
    """

    def __init__(self, text: ModelText, *, kind: Kind = "chat_template") -> None:
        if text.template is None:
            raise ConfigError(
                "the model has no chat template: set [gateway].tokenizer to a folder that has one, "
                "or [gateway].renderer to the model's family"
            )
        self._codec = TokenCodec(text.tokenizer)
        self._template = text.template
        self._native_tools = text.template.reads_tools
        self._takes_tools = kind == "chatml" or (
            self._native_tools and hermes.CALL_OPEN in text.template.source
        )
        self._reasons = THINK_OPEN in text.template.source
        self._tag = NameTag(kind, text.template.source, text.tokenizer.to_str())
        self._opens: dict[bool | None, bool] = {}
        if kind == "chatml" and "<|im_start|>" not in self._codec.special:
            raise ConfigError(
                "[gateway].renderer is 'chatml', but the tokenizer has no control token "
                "<|im_start|>: use 'auto' or 'chat_template'"
            )
        self._end_ids = text.end_ids | self._closing_ids()

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._end_ids

    @property
    def longest_token(self) -> int:
        """Upper bound of the UTF-8 bytes that one token stands for."""
        return self._codec.longest_token

    def name(self, tools: Sequence[Tool]) -> RendererName:
        """Template, tokenizer and tools, hashed together."""
        return self._tag.with_tools(tools)

    def render(self, conversation: Conversation) -> list[int]:
        """The prompt for an answer to `conversation`.

        Raises:
            RequestRefused: when the template does, for tools that it cannot describe, or when a
                control token that a message spells cannot be told from the template's own.
        """
        return self._codec.encode(self._text(conversation))

    def extend(
        self, conversation: Conversation, *, num_known: int, known_ids: Sequence[int]
    ) -> list[int]:
        """What follows `known_ids`, which end with the answer `messages[num_known - 1]`.

        The text after that answer is cut from the whole rendered conversation, so boundary tokens
        are the template's. Reasoning that was sampled stays in the history, whatever the template
        would do with it. Empty when the template renders other turns before the answer anew, or
        when the answer ended within its reasoning.
        """
        rest = self._rest(conversation, num_known)
        if rest is None or self._ended_thinking(conversation.messages[num_known - 1], known_ids):
            return []
        ids = self._codec.encode(rest)
        last_id = known_ids[-1]
        if last_id not in self._end_ids:
            return ids
        return ids[1:] if ids[:1] == [last_id] else []

    def is_told_alike(self, conversation: Conversation, *, thinking: bool | None) -> bool:
        """Whether a prompt says the same under another switch of reasoning."""
        try:
            prompts = [
                self._text(conversation),
                self._text(replace(conversation, thinking=thinking)),
            ]
        except RequestRefused:
            return False
        one, other = (beside_reasoning(text, (THINK_OPEN, THINK_CLOSE)) for text in prompts)
        return one == other

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text on its own, control tokens included."""
        return self._codec.tokenize(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return self._codec.decode(token_ids)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of one token."""
        return self._codec.token_text(token_id)

    def parser(
        self,
        conversation: Conversation | None,
        *,
        choice_index: int,
        stops: Sequence[str],
        parse_tools: bool,
    ) -> AnswerParser:
        """A parser for one choice; reasoning is read where the template knows it."""
        tools = conversation is not None and parse_tools and bool(conversation.tools)
        splitter: Splitter = PlainSplitter()
        if conversation is not None and (self._reasons or tools):
            opened = self._reasons and self._opens_reasoning(conversation.thinking)
            splitter = HermesSplitter(Expected(reasoning=self._reasons, opened=opened, tools=tools))
        source = self._codec.text_source()
        return AnswerParser(source, splitter, choice_index=choice_index, stops=stops)

    def tool_grammar(
        self, tools: Sequence[Tool], choice: ToolChoice
    ) -> Mapping[str, object] | None:
        """Calls in the form of Hermes; None when nothing is forced."""
        return call_grammar(HERMES, tools, choice, tokens=self._codec.added)

    def _text(self, conversation: Conversation) -> str:
        tools = hidden_specs(conversation.tools, self._codec.control)
        if tools and not self._takes_tools:
            raise RequestRefused(
                "the chat template of this model does not say how tools are called: "
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
        """Refuse what the template cannot be told."""
        if thinking and not self._reasons:
            raise RequestRefused("this model does not reason", param="thinking")
        told = thinking is None or self._template.reads_thinking or not self._reasons
        if not told and not thinking and self._opens_reasoning(None):
            raise RequestRefused("reasoning of this model cannot be switched off", param="thinking")

    def _messages(self, conversation: Conversation) -> list[TemplateMessage]:
        if self._native_tools or not self._takes_tools:
            return native_messages(conversation.messages, self._codec.control)
        return hermes_messages(conversation, conversation.messages, self._codec.control)

    def _rest(self, conversation: Conversation, num_known: int) -> str | None:
        """The rendered text after an answer; None when what is before it was rendered otherwise."""
        mark = f"mark{secrets.token_hex(16)}"
        known = [replace(message, reasoning=None) for message in conversation.messages[:num_known]]
        marked = Message(role="assistant", content=mark)
        new = conversation.messages[num_known:]
        try:
            whole = self._text(replace(conversation, messages=(*known[:-1], marked, *new)))
            prompt = self._text(replace(conversation, messages=tuple(known[:-1])))
        except RequestRefused:
            return None
        before, found, rest = whole.partition(mark)
        same = before == prompt or (
            self._reasons and _without_reasoning(before) == _without_reasoning(prompt)
        )
        return rest if found and same else None

    def _ended_thinking(self, answer: Message, known_ids: Sequence[int]) -> bool:
        """Whether an answer was cut within its reasoning, which the boundary would not close."""
        # The ids decide: a caller may have left out what was thought.
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
        """The control token that the template writes after an answer, if it does."""
        question = Message(role="user", content="x")
        probe = Conversation(messages=(question, Message(role="assistant", content="x"), question))
        rest = self._rest(probe, 2) or ""
        ids = self._codec.encode(rest)[:1]
        return frozenset(ids) & frozenset(self._codec.special.values())


def _without_reasoning(prompt: str) -> str:
    """A prompt without the reasoning markers, or the empty reasoning, that it may end with."""
    prompt = prompt.rstrip()
    for marker in (THINK_CLOSE, THINK_OPEN):
        prompt = prompt.removesuffix(marker).rstrip()
    return prompt
