"""Reads answers of a family: text as it comes, calls by the family's own parser at the end."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from onlinerl.serving.encoding.json import read_json_text, unescaped_json
from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.parsing.family_markup import ChannelMarkup, FamilyMarkup
from onlinerl.serving.parsing.family_splitter import ChannelSplitter, HeldCallsSplitter
from onlinerl.serving.parsing.output_parser import AnswerParser, Part, Said, Splitter, new_call_id
from onlinerl.serving.parsing.tagged_text import Expected
from onlinerl.serving.tokens.codec import TokenCodec

if TYPE_CHECKING:
    from renderers.base import ParsedResponse, ParsedToolCall

logger = logging.getLogger(__name__)

Parse = Callable[[list[int]], "ParsedResponse"]
"""Sampled ids to what the family's parser makes of them."""


def family_parser(
    codec: TokenCodec,
    markup: FamilyMarkup,
    expected: Expected,
    *,
    end_ids: frozenset[int],
    parse: Parse,
    choice_index: int,
    stops: Sequence[str],
) -> AnswerParser:
    """A parser for one choice."""
    source = MarkedText(codec, shown=markup.shown, end_ids=end_ids)

    def read_calls(held: str) -> Sequence[Part]:
        # Past a stop string the ids say more than the text that counts.
        if parser.cut_at is not None:
            return [Said(held)]
        try:
            attempts = parse(source.token_ids).tool_calls
        except Exception as error:  # noqa: BLE001 the parser is not ours, and may meet anything
            # Its type alone: the message of an error may quote the answer.
            logger.warning("calls could not be parsed", extra={"error": type(error).__name__})
            return [Said(held)]
        return _parts(attempts, held=held, source=source)

    splitter: Splitter
    if isinstance(markup, ChannelMarkup):
        splitter = ChannelSplitter(expected, markup, read_calls=read_calls)
    else:
        splitter = HeldCallsSplitter(expected, markup, read_calls=read_calls)
    parser = AnswerParser(source, splitter, choice_index=choice_index, stops=stops)
    return parser


class MarkedText:
    """The `TextSource` of families: markers that are control tokens are spelled out.

    The token that ends an answer says nothing, even where it is no control token.
    """

    def __init__(
        self, codec: TokenCodec, *, shown: frozenset[str], end_ids: frozenset[int]
    ) -> None:
        self.token_ids: list[int] = []
        """Everything that was pushed."""
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
        """What is held, when no token follows."""
        return self._stream.flush()

    def prose(self, start: int, end: int) -> Sequence[Part]:
        """What some of the ids say beside markup."""
        ids = [i for i in self.token_ids[start:end] if self._markers.get(i) != ""]
        text = self._codec.decode_all(ids)
        for marker in sorted(self._shown, key=len, reverse=True):
            text = text.replace(marker, "")
        text = self._codec.control.spelled.sub("", text).strip()
        return [Said(text)] if text else []

    def spelled(self, start: int, end: int) -> str:
        """Text of some of the ids, with every control token."""
        return self._codec.decode_all(self.token_ids[start:end])


def _parts(
    attempts: "Sequence[ParsedToolCall]", *, held: str, source: MarkedText
) -> Sequence[Part]:
    """Valid calls as calls, others as the text that they are; all of it text without any call."""
    calls = [_call(attempt) for attempt in attempts]
    if not any(calls):
        return [Said(held)]
    parts: list[Part] = []
    end = 0
    for attempt, call in zip(attempts, calls, strict=True):
        start, stop = attempt.token_span or (end, end)
        parts += source.prose(end, start) if end else []
        malformed = source.spelled(start, stop) or attempt.raw
        parts.append(Said(malformed) if call is None else call)
        end = max(end, stop)
    return [*parts, *(source.prose(end, len(source.token_ids)) if end else [])]


def _call(attempt: "ParsedToolCall") -> ToolCall | None:
    """The call that an attempt is; None for a malformed one."""
    # A value that is no JSON, of a parameter whose schema does not say string, is still a value.
    if attempt.status not in ("ok", "invalid_json") or not isinstance(attempt.name, str):
        return None
    arguments = _arguments(attempt.arguments)
    if arguments is None:
        return None
    return ToolCall(id=attempt.id or new_call_id(), name=attempt.name, arguments=arguments)


def _arguments(parsed: object) -> str | None:
    """JSON text of an object; None for anything else."""
    if parsed is None:
        return "{}"
    try:
        text = parsed if isinstance(parsed, str) else unescaped_json(parsed)
        return text if isinstance(read_json_text(text), dict) else None
    except (ValueError, RecursionError):
        return None
