"""The `Renderer` of a model family, from the package `renderers`."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from onlinerl.errors import ConfigError, RequestRefused
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
from onlinerl.serving.parsing.tagged_text import AnswerFeatures
from onlinerl.serving.rendering.chat_template import ModelText
from onlinerl.serving.rendering.families import family_config
from onlinerl.serving.rendering.family_tokenizer import FamilyTokenizer, OffsetTokenizer
from onlinerl.serving.rendering.model_renderer import ModelRenderer
from onlinerl.serving.rendering.protocol import without_markers
from onlinerl.serving.rendering.template_messages import hidden_specs, native_messages
from onlinerl.serving.rendering.tool_grammar import family_grammar
from onlinerl.serving.tokens.codec import RendererHash

if TYPE_CHECKING:
    from renderers.base import Renderer as Inner

logger = logging.getLogger(__name__)

_READ_OFFSETS = frozenset(
    # Their renderers would otherwise find the places of tokens by decoding them one by one.
    {"hy3", "deepseek-v4", "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"}
)
_SWITCHES = ("enable_thinking", "thinking")
_FAULTS = (ValueError, TypeError, KeyError, AssertionError, NotImplementedError, RuntimeError)
"""Raised by `renderers` for messages that a family cannot write."""
_QUESTION = Message(role="user", content="x")
_MARK = "answermark"
"""Stands for an answer, or for an argument of a call, in prompts that are searched for it."""
_CALL = ToolCall(id="functions.f:0", name="f", arguments=json.dumps({"x": _MARK}))
_ANSWER = Message(role="assistant", content=_MARK)
_CALL_MESSAGE = Message(role="assistant", tool_calls=(_CALL,))
_RESULT = Message(role="tool", content="x", tool_call_id=_CALL.id, name=_CALL.name)


class FamilyRenderer(ModelRenderer):
    """Renders, extends and reads answers by the rules of one family.

    Sampled reasoning stays in the history of a session that is extended. A history that is rendered
    anew follows the family's template.

    Args:
        family: A name of `family_names()`.
        text: Tokenizer and end tokens of the model.
        source: The model's folder or Hugging Face id.
        on_parse_failure: Called for each answer whose calls the family's parser cannot read.

    Raises:
        ConfigError: the tokenizer lacks a token of the family, or the family's own vocabulary
            could not be loaded.
    """

    def __init__(
        self,
        family: str,
        text: ModelText,
        *,
        source: str,
        on_parse_failure: Callable[[], None] = lambda: None,
    ) -> None:
        rules = RendererHash(
            family,
            version("renderers"),
            family_config(family).model_dump_json(),
            text.tokenizer.to_str(),
        )
        super().__init__(text, rules=rules)
        self._family = family
        self._on_parse_failure = on_parse_failure
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
        self._end_ids |= frozenset(self._inner(None).get_stop_token_ids())
        self._extends = True
        self._decodable = self._end_ids <= frozenset(self._codec.special.values())
        self._extends = self._is_exact()
        if not self._extends:
            logger.warning(
                "sessions are rendered anew at every turn: the family's way to continue an answer "
                "differs from its own template",
                extra={"renderer": family},
            )

    @override
    def render(self, conversation: Conversation) -> list[int]:
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

    @override
    def extend(
        self, conversation: Conversation, *, num_known: int, known_ids: Sequence[int]
    ) -> list[int]:
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

    @override
    def is_same_prompt(self, conversation: Conversation, *, thinking: bool | None) -> bool:
        markers = (*self._markup.reasoning_headers, *self._markup.reasoning_ends)
        try:
            prompts = [
                self.render(conversation),
                self.render(replace(conversation, thinking=thinking)),
            ]
        except RequestRefused:
            return False
        one, other = (without_markers(self._codec.decode_all(ids), markers) for ids in prompts)
        return one == other

    @override
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens and without the tokens that end an answer."""
        if self._decodable:
            return self._codec.decode(token_ids)
        return self._codec.decode([i for i in token_ids if i not in self._end_ids])

    @override
    def parser(
        self,
        conversation: Conversation | None,
        *,
        choice_index: int,
        stops: Sequence[str],
        parse_tools: bool,
    ) -> AnswerParser:
        if conversation is None:
            return plain_parser(self.decode, choice_index=choice_index, stops=stops)
        tail = self._tail(conversation.thinking, conversation.messages)
        inner = self._inner(conversation.thinking)
        specs = self._specs(conversation.tools)
        return family_parser(
            self._codec,
            self._markup,
            AnswerFeatures(
                reasoning=self._markup.reasons,
                starts_reasoning=self._opens_reasoning(tail),
                tools=parse_tools and bool(conversation.tools),
            ),
            end_ids=self._end_ids,
            parse=lambda ids: inner.parse_response(ids, tools=specs, prompt_ids=tail),
            choice_index=choice_index,
            stops=stops,
            on_parse_failure=self._on_parse_failure,
        )

    @override
    def tool_grammar(
        self, tools: Sequence[Tool], choice: ToolChoice
    ) -> Mapping[str, object] | None:
        return family_grammar(self._family, tools, choice, tokens=self._codec.added)

    def _inner(self, thinking: bool | None) -> "Inner":
        """The family's renderer for one switch of reasoning, which is fixed at its construction."""
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
        except (AssertionError, ValueError) as error:
            raise ConfigError(
                f"[gateway].renderer is {self._family!r}, which does not fit the tokenizer: {error}"
            ) from error
        except (RuntimeError, OSError) as error:  # only gpt-oss loads a vocabulary of its own
            raise ConfigError(
                f"[gateway].renderer is {self._family!r}, whose vocabulary could not be loaded: "
                f"{error}; see TIKTOKEN_ENCODINGS_BASE in docs/renderers.md"
            ) from error

    def _messages(self, conversation: Conversation) -> list[Any]:
        return native_messages(conversation.messages, self._codec.control)

    def _specs(self, tools: Sequence[Tool]) -> list[Any] | None:
        return list(hidden_specs(tools, self._codec.control)) or None

    def _tail(self, thinking: bool | None, messages: Sequence[Message]) -> list[int]:
        """The end of prompts for an answer to `messages`; it depends on their last role only."""
        after_tool = bool(messages) and messages[-1].role == "tool"
        key = (thinking, after_tool)
        if key not in self._tails:
            self._tails[key] = self._probe(thinking, after_tool=after_tool)
        return self._tails[key]

    def _probe(self, thinking: bool | None, *, after_tool: bool) -> list[int]:
        probe = Conversation(
            messages=(_QUESTION, *((_CALL_MESSAGE, _RESULT) if after_tool else ())),
            tools=(Tool(name=_CALL.name, parameters={"type": "object"}),) if after_tool else (),
        )
        messages, specs = self._messages(probe), self._specs(probe.tools)
        inner = self._inner(thinking)
        whole = inner.render_ids(messages, tools=specs, add_generation_prompt=True)
        rest = inner.render_ids(messages, tools=specs, add_generation_prompt=False)
        return whole[len(rest) :] if whole[: len(rest)] == rest else []

    def _answer_tail(self, thinking: bool | None, answered: Sequence[Message]) -> list[int]:
        """The end of the prompt that the last known answer was sampled for."""
        # Some families write no new header after the result of a tool.
        return self._tail(thinking, answered) or self._tail(thinking, ())

    def _opens_reasoning(self, tail: Sequence[int]) -> bool:
        """Whether prompts that end with `tail` end within reasoning."""
        text = self._codec.decode_all(tail).rstrip()
        return any(text.endswith(header.rstrip()) for header in self._markup.reasoning_headers)

    def _is_closed(
        self, answer: Message, follower: Role, *, known_ids: list[int], rest: list[int]
    ) -> bool:
        """Whether an answer, together with `rest`, ends as the family's template would end it.

        The family's bridge does not check this: it continues after any end token, and closes an
        answer that was cut in a way of its own.
        """
        called = bool(answer.tool_calls)
        closing = self._closing(called, follower)
        if not closing:
            return False
        if known_ids[-1] in self._end_ids:
            size = 1 if called else len(closing)
            return known_ids[-size:] == closing[-size:]
        # A call that was cut may also lack some of its own markup.
        return not called and rest[: len(closing)] == closing

    def _ended_thinking(self, answer: Message, token_ids: Sequence[int]) -> bool:
        """Whether an answer was cut within its reasoning; only the model may close it."""
        if answer.content or answer.tool_calls:
            return False
        text = self._codec.decode_all(token_ids)
        opened = (text.rfind(header.rstrip()) for header in self._markup.reasoning_headers)
        closed = (text.rfind(end) for end in self._markup.reasoning_ends)
        return max(opened, default=-1) > max(closed, default=-1)

    def _closing(self, called: bool, follower: Role) -> list[int]:
        """The tokens that the template writes after an answer, up to and with its end token.

        Empty if the template writes no end token there.
        """
        key = (called, follower)
        if key not in self._closings:
            text = self._after_mark(called, follower)
            ends = [self._codec.token_text(end)[0] for end in self._end_ids]
            at = min((at + len(end) for end in ends if (at := text.find(end)) >= 0), default=0)
            self._closings[key] = self._codec.tokenize(text[:at])
        return self._closings[key]

    def _after_mark(self, called: bool, follower: Role) -> str:
        """The text that the template writes after the mark; empty if the family refuses it."""
        answer = _CALL_MESSAGE if called else _ANSWER
        after = _RESULT if follower == "tool" else Message(role=follower, content="x")
        try:
            ids = self.render(Conversation(messages=(_QUESTION, answer, after)))
        except RequestRefused:
            return ""
        return self._codec.decode_all(ids).partition(_MARK)[2]

    def _is_exact(self) -> bool:
        """Whether extending an answer gives the text that rendering all of it anew gives."""
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
    """The end of the last occurrence of `part` in `ids`; None if it is empty or missing."""
    size = len(part)
    for start in range(len(ids) - size, -1, -1):
        if size and ids[start : start + size] == part:
            return start + size
    return None
