"""Reads answers of a family: text as it comes, calls with the family's own parser at the end."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from onlinerl.serving.encoding.json import read_json_text, unescaped_json
from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.parsing.family_markup import ChannelMarkup, FamilyMarkup
from onlinerl.serving.parsing.family_splitter import ChannelSplitter, HeldCallsSplitter
from onlinerl.serving.parsing.output_parser import (
    AnswerParser,
    Part,
    Splitter,
    TextPart,
    new_call_id,
)
from onlinerl.serving.parsing.tagged_text import AnswerFeatures
from onlinerl.serving.tokens.codec import TokenCodec

if TYPE_CHECKING:
    from renderers.base import ParsedResponse, ParsedToolCall

logger = logging.getLogger(__name__)

Parse = Callable[[list[int]], "ParsedResponse"]
"""The family's own parser: all sampled ids to text and calls."""


def family_parser(
    codec: TokenCodec,
    markup: FamilyMarkup,
    features: AnswerFeatures,
    *,
    end_ids: frozenset[int],
    parse: Parse,
    choice_index: int,
    stops: Sequence[str],
    on_parse_failure: Callable[[], None] = lambda: None,
) -> AnswerParser:
    """A parser for one choice.

    Args:
        codec: The tokenizer of the model.
        markup: How the family marks reasoning and calls.
        features: What the answer may hold.
        end_ids: Tokens that end an answer.
        parse: The family's own parser; called at most once, at the end.
        choice_index: Which of several choices this is.
        stops: Stop strings.
        on_parse_failure: Called if `parse` raises; the calls are then shown as text.
    """
    source = MarkedText(codec, shown=markup.shown, end_ids=end_ids)

    def read_calls(held: str) -> Sequence[Part]:
        # The ids go on past a stop string, but the text that counts does not.
        if parser.cut_at is not None:
            return [TextPart(held)]
        try:
            attempts = parse(source.token_ids).tool_calls
        except Exception as error:  # noqa: BLE001 a foreign parser that reads arbitrary answers
            # The type alone: the message of an error may quote the answer.
            logger.warning("calls could not be parsed", extra={"error": type(error).__name__})
            on_parse_failure()
            return [TextPart(held)]
        return _parts(attempts, held=held, source=source)

    splitter: Splitter
    if isinstance(markup, ChannelMarkup):
        splitter = ChannelSplitter(features, markup, read_calls=read_calls)
    else:
        splitter = HeldCallsSplitter(features, markup, read_calls=read_calls)
    parser = AnswerParser(source, splitter, choice_index=choice_index, stops=stops)
    return parser


class MarkedText:
    """The `TextSource` of families: spells out markers that are control tokens.

    Tokens that end an answer have no text, even if they are no control tokens.
    """

    def __init__(
        self, codec: TokenCodec, *, shown: frozenset[str], end_ids: frozenset[int]
    ) -> None:
        self.token_ids: list[int] = []
        """All ids that were pushed."""
        self._codec = codec
        self._shown = shown - {""}
        self._stream = codec.text_source()
        self._markers = {
            token_id: text for text, token_id in codec.special.items() if text in shown
        } | dict.fromkeys(end_ids, "")

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        self.token_ids.append(token_id)
        marker = self._markers.get(token_id)
        if marker is None:
            return self._stream.push(token_id)
        before = self._stream.flush()
        self._stream = self._codec.text_source()
        return before + marker

    def flush(self) -> str:
        """The rest of the text; call it after the last token."""
        return self._stream.flush()

    def prose(self, start: int, end: int) -> Sequence[Part]:
        """The text of some of the ids without markup; empty if there is none."""
        ids = [i for i in self.token_ids[start:end] if self._markers.get(i) != ""]
        text = self._codec.decode_all(ids)
        for marker in sorted(self._shown, key=len, reverse=True):
            text = text.replace(marker, "")
        text = self._codec.control.pattern.sub("", text).strip()
        return [TextPart(text)] if text else []

    def spelled(self, start: int, end: int) -> str:
        """The text of some of the ids, control tokens included."""
        return self._codec.decode_all(self.token_ids[start:end])


def _parts(
    attempts: "Sequence[ParsedToolCall]", *, held: str, source: MarkedText
) -> Sequence[Part]:
    """Valid calls as calls, malformed ones as text; if none is valid, all of it is one text."""
    calls = [_call(attempt) for attempt in attempts]
    if not any(calls):
        return [TextPart(held)]
    parts: list[Part] = []
    end = 0
    for attempt, call in zip(attempts, calls, strict=True):
        start, stop = attempt.token_span or (end, end)
        parts += source.prose(end, start) if end else []
        malformed = source.spelled(start, stop) or attempt.raw
        parts.append(TextPart(malformed) if call is None else call)
        end = max(end, stop)
    return [*parts, *(source.prose(end, len(source.token_ids)) if end else [])]


def _call(attempt: "ParsedToolCall") -> ToolCall | None:
    """The call of an attempt; None for a malformed one."""
    # `invalid_json`: a value that is no JSON counts as a string, whatever the schema says.
    if attempt.status not in ("ok", "invalid_json") or not isinstance(attempt.name, str):
        return None
    arguments = _arguments(attempt.arguments)
    if arguments is None:
        return None
    return ToolCall(id=attempt.id or new_call_id(), name=attempt.name, arguments=arguments)


def _arguments(parsed: object) -> str | None:
    """The arguments as JSON text; None if they are no object."""
    if parsed is None:
        return "{}"
    try:
        text = parsed if isinstance(parsed, str) else unescaped_json(parsed)
        return text if isinstance(read_json_text(text), dict) else None
    except (ValueError, RecursionError):
        return None
