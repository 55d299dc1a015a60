"""The `Renderer` of a model family, from the package `renderers`."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.rollout_store.schema import RendererName
from onlinerl.serving.interaction.request import (
    Conversation,
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
)
from onlinerl.serving.parsing.family_markup import markup_of
from onlinerl.serving.parsing.family_parser import family_parser
from onlinerl.serving.parsing.output_parser import AnswerParser, plain_parser
from onlinerl.serving.parsing.tagged_text import Expected
from onlinerl.serving.rendering.chat_template import ModelText
from onlinerl.serving.rendering.families import family_config
from onlinerl.serving.rendering.family_tokenizer import FamilyTokenizer, OffsetTokenizer
from onlinerl.serving.rendering.protocol import beside_reasoning
from onlinerl.serving.rendering.template_messages import hidden_specs, native_messages
from onlinerl.serving.rendering.tool_grammar import family_grammar
from onlinerl.serving.tokens.codec import NameTag, TokenCodec

if TYPE_CHECKING:
    from renderers.base import Renderer as Inner

logger = logging.getLogger(__name__)

_READ_OFFSETS = frozenset(
    # These would find the places of tokens by decoding them one by one.
    {"hy3", "deepseek-v4", "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"}
)
_SWITCHES = ("enable_thinking", "thinking")
_FAULTS = (ValueError, TypeError, KeyError, AssertionError, NotImplementedError, RuntimeError)
"""What a renderer raises for messages that its family cannot write."""
_QUESTION = Message(role="user", content="x")
_MARK = "answermark"
"""Stands for an answer, or an argument of a call, where what follows is looked for."""
_CALL = ToolCall(id="functions.f:0", name="f", arguments=json.dumps({"x": _MARK}))
_ANSWER = Message(role="assistant", content=_MARK)
_CALLED = Message(role="assistant", tool_calls=(_CALL,))
_RESULT = Message(role="tool", content="x", tool_call_id=_CALL.id, name=_CALL.name)


class FamilyRenderer:
    """Renders, extends and reads answers by the rules of one family.

    Reasoning that was sampled stays in the history of a session that is extended; a history that
    is rendered anew follows the family's template.
    """

    def __init__(self, family: str, text: ModelText, *, source: str) -> None:
        """The renderer of `family` for a model's tokenizer.

        Raises:
            ConfigError: when the tokenizer lacks a token of the family.
        """
        self._family = family
        self._codec = TokenCodec(text.tokenizer)
        kind = OffsetTokenizer if family in _READ_OFFSETS else FamilyTokenizer
        self._tokenizer = kind(
            self._codec,
            source=source,
            template=text.template.source if text.template else "",
            eos_token_id=min(text.end_ids, default=None),
        )
        self._inners: dict[bool | None, Inner] = {}
        self._tails: dict[tuple[bool | None, bool], list[int]] = {}
        self._closings: dict[tuple[bool, Role], list[int]] = {}
        self._markup = markup_of(family)
        self._end_ids = text.end_ids | frozenset(self._inner(None).get_stop_token_ids())
        self._extends = True
        self._decodable = self._end_ids <= frozenset(self._codec.special.values())
        self._extends = self._is_exact()
        if not self._extends:
            logger.warning(
                "sessions are rendered anew at every turn: the family's boundary differs from its "
                "own template",
                extra={"renderer": family},
            )
        self._tag = NameTag(
            family,
            version("renderers"),
            family_config(family).model_dump_json(),
            text.tokenizer.to_str(),
        )

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._end_ids

    @property
    def longest_token(self) -> int:
        """Upper bound of the UTF-8 bytes that one token stands for."""
        return self._codec.longest_token

    def name(self, tools: Sequence[Tool]) -> RendererName:
        """Family, version of `renderers`, tokenizer and tools, hashed together."""
        return self._tag.with_tools(tools)

    def render(self, conversation: Conversation) -> list[int]:
        """The prompt for an answer to `conversation`.

        Raises:
            RequestRefused: for what the family cannot write.
        """
        inner = self._inner(conversation.thinking)
        try:
            ids: list[int] = inner.render_ids(
                self._messages(conversation),
                tools=self._specs(conversation.tools),
                add_generation_prompt=True,
            )
        except _FAULTS as error:
            why = self._codec.control.spell(str(error))
            raise RequestRefused(
                f"the renderer of {self._family} refuses: {why}", 400, "messages"
            ) from error
        return ids

    def extend(
        self, conversation: Conversation, *, num_known: int, known_ids: Sequence[int]
    ) -> list[int]:
        """What follows `known_ids`; empty when the family cannot prove it."""
        known = list(known_ids)
        messages = self._messages(conversation)
        tail = self._answer_tail(conversation.thinking, conversation.messages[: num_known - 1])
        start = _last_end(tail, known)
        if start is None or not self._extends:
            return []
        try:
            bridged = self._inner(conversation.thinking).bridge_to_next_turn(
                known[:start],
                known[start:],
                messages[num_known:],
                tools=self._specs(conversation.tools),
            )
        except _FAULTS:
            return []
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return []
        rest: list[int] = bridged.token_ids[len(known) :]
        answer, follower, *_ = conversation.messages[num_known - 1 :]
        closed = self._is_closed(answer, follower.role, known_ids=known, rest=rest)
        if not closed or self._ended_thinking(answer, [*tail, *known[start:]]):
            return []
        return rest

    def is_told_alike(self, conversation: Conversation, *, thinking: bool | None) -> bool:
        """Whether a prompt says the same under another switch of reasoning."""
        markers = (*self._markup.reasoning_headers, *self._markup.reasoning_ends)
        try:
            prompts = [
                self.render(conversation),
                self.render(replace(conversation, thinking=thinking)),
            ]
        except RequestRefused:
            return False
        one, other = (beside_reasoning(self._codec.decode_all(ids), markers) for ids in prompts)
        return one == other

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text on its own, control tokens included."""
        return self._codec.tokenize(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens and ends of answers."""
        if self._decodable:
            return self._codec.decode(token_ids)
        return self._codec.decode([i for i in token_ids if i not in self._end_ids])

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
        """A parser for one choice of an answer to `conversation`; None is a raw prompt."""
        if conversation is None:
            return plain_parser(self.decode, choice_index=choice_index, stops=stops)
        tail = self._tail(conversation.thinking, conversation.messages)
        inner = self._inner(conversation.thinking)
        specs = self._specs(conversation.tools)
        return family_parser(
            self._codec,
            self._markup,
            Expected(
                reasoning=self._markup.reasons,
                opened=self._opens_reasoning(tail),
                tools=parse_tools and bool(conversation.tools),
            ),
            end_ids=self._end_ids,
            parse=lambda ids: inner.parse_response(ids, tools=specs, prompt_ids=tail),
            choice_index=choice_index,
            stops=stops,
        )

    def tool_grammar(
        self, tools: Sequence[Tool], choice: ToolChoice
    ) -> Mapping[str, object] | None:
        """Calls in the markup of the family; None when nothing is forced."""
        return family_grammar(self._family, tools, choice, tokens=self._codec.added)

    def _inner(self, thinking: bool | None) -> "Inner":
        """The family's renderer; it fixes at construction whether the model thinks."""
        if thinking not in self._inners:
            self._inners[thinking] = self._make_inner(thinking)
        return self._inners[thinking]

    def _make_inner(self, thinking: bool | None) -> "Inner":
        from renderers.base import create_renderer, merge_chat_template_kwargs, template_field_names

        config = family_config(self._family)
        switch = [name for name in _SWITCHES if name in template_field_names(config)]
        if thinking is not None:
            if switch:
                config = merge_chat_template_kwargs(config, {switch[0]: thinking})
            elif thinking or self._opens_reasoning(self._tail(None, ())):
                raise RequestRefused(
                    f"reasoning of {self._family} cannot be switched {'on' if thinking else 'off'}",
                    param="thinking",
                )
        try:
            return create_renderer(self._tokenizer, config)
        except AssertionError as error:
            raise ConfigError(
                f"[gateway].renderer is {self._family!r}, which does not fit the tokenizer: {error}"
            ) from error
        except Exception as error:  # gpt-oss fetches its vocabulary, with whatever that raises
            raise ConfigError(
                f"[gateway].renderer is {self._family!r}, which does not start: {error}"
            ) from error

    def _messages(self, conversation: Conversation) -> list[Any]:
        return native_messages(conversation.messages, self._codec.control)

    def _specs(self, tools: Sequence[Tool]) -> list[Any] | None:
        return list(hidden_specs(tools, self._codec.control)) or None

    def _tail(self, thinking: bool | None, messages: Sequence[Message]) -> list[int]:
        """The end of prompts for an answer to `messages`, which depends on the last role only."""
        after_tool = bool(messages) and messages[-1].role == "tool"
        key = (thinking, after_tool)
        if key not in self._tails:
            self._tails[key] = self._probe(thinking, after_tool=after_tool)
        return self._tails[key]

    def _probe(self, thinking: bool | None, *, after_tool: bool) -> list[int]:
        probe = Conversation(
            messages=(_QUESTION, *((_CALLED, _RESULT) if after_tool else ())),
            tools=(Tool(name=_CALL.name, parameters={"type": "object"}),) if after_tool else (),
        )
        messages, specs = self._messages(probe), self._specs(probe.tools)
        inner = self._inner(thinking)
        whole = inner.render_ids(messages, tools=specs, add_generation_prompt=True)
        rest = inner.render_ids(messages, tools=specs, add_generation_prompt=False)
        return whole[len(rest) :] if whole[: len(rest)] == rest else []

    def _answer_tail(self, thinking: bool | None, answered: Sequence[Message]) -> list[int]:
        """The end of the prompt for the last known answer."""
        # After the result of a tool some families go on without a new header.
        return self._tail(thinking, answered) or self._tail(thinking, ())

    def _opens_reasoning(self, tail: Sequence[int]) -> bool:
        """Whether prompts that end with `tail` end within reasoning."""
        text = self._codec.decode_all(tail).rstrip()
        return any(text.endswith(header.rstrip()) for header in self._markup.reasoning_headers)

    def _is_closed(
        self, answer: Message, follower: Role, *, known_ids: list[int], rest: list[int]
    ) -> bool:
        """Whether an answer ends, with what follows it, as the family's template ends it.

        A bridge goes on after any end token, and closes a cut answer in a way of its own.
        """
        called = bool(answer.tool_calls)
        closing = self._closing(called, follower)
        if not closing:
            return False
        if known_ids[-1] in self._end_ids:
            size = 1 if called else len(closing)
            return known_ids[-size:] == closing[-size:]
        # A call that was cut may lack some of its own markup too.
        return not called and rest[: len(closing)] == closing

    def _ended_thinking(self, answer: Message, token_ids: Sequence[int]) -> bool:
        """Whether an answer was cut within its reasoning, which only the model may close."""
        if answer.content or answer.tool_calls:
            return False
        text = self._codec.decode_all(token_ids)
        opened = (text.rfind(header.rstrip()) for header in self._markup.reasoning_headers)
        closed = (text.rfind(end) for end in self._markup.reasoning_ends)
        return max(opened, default=-1) > max(closed, default=-1)

    def _closing(self, called: bool, follower: Role) -> list[int]:
        """What the template writes from the mark to the end token of an answer.

        Empty where no end token stands before what follows.
        """
        key = (called, follower)
        if key not in self._closings:
            text = self._after_mark(called, follower)
            ends = [self._codec.token_text(end)[0] for end in self._end_ids]
            at = min((at + len(end) for end in ends if (at := text.find(end)) >= 0), default=0)
            self._closings[key] = self._codec.tokenize(text[:at])
        return self._closings[key]

    def _after_mark(self, called: bool, follower: Role) -> str:
        """What the template writes after the mark; empty where the family refuses to."""
        answer = _CALLED if called else _ANSWER
        after = _RESULT if follower == "tool" else Message(role=follower, content="x")
        try:
            ids = self.render(Conversation(messages=(_QUESTION, answer, after)))
        except RequestRefused:
            return ""
        return self._codec.decode_all(ids).partition(_MARK)[2]

    def _is_exact(self) -> bool:
        """Whether the family goes on after an answer as when it renders all of it anew."""
        probe = Conversation(messages=(_QUESTION, _ANSWER, _QUESTION))
        prompt = self.render(Conversation(messages=(_QUESTION,)))
        closing = self._closing(False, "user")
        rests = [
            self.extend(
                probe,
                num_known=2,
                known_ids=[*prompt, *self._codec.tokenize(thought + _MARK), *closing],
            )
            for thought in self._markup.empty_thoughts
        ]
        texts = [self._codec.decode_all([*closing, *rest]) for rest in rests if rest]
        return self._after_mark(False, "user") in texts


def _last_end(part: Sequence[int], ids: Sequence[int]) -> int | None:
    """Where `part` ends in `ids` for the last time; None where it is empty or missing."""
    size = len(part)
    for start in range(len(ids) - size, -1, -1):
        if size and ids[start : start + size] == part:
            return start + size
    return None
