"""The caller sees what the parser of a family reports, for every family."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from onlinerl.serving.interaction.request import Conversation, Message, Tool
from onlinerl.serving.parsing.family_markup import TagMarkup
from onlinerl.serving.parsing.family_parser import Parse, family_parser
from onlinerl.serving.parsing.output_parser import AnswerParser
from onlinerl.serving.parsing.tagged_text import AnswerFeatures
from onlinerl.serving.tokens.codec import TokenCodec
from tests.serving.families import family_renderer
from tests.serving.small_tokenizers import small_tokenizer

CODEC = TokenCodec(
    small_tokenizer(["<|end|>", "<tool_call>", "</tool_call>"], plain=["<think>", "</think>"])
)
END = CODEC.special["<|end|>"]


def answer(text: str, *attempts: ParsedToolCall) -> AnswerParser:
    """An answer `text`, in which the family's parser finds `attempts`."""
    return parsed(text, lambda _: ParsedResponse(content="", tool_calls=list(attempts)))


def parsed(
    text: str, parse: Parse, on_parse_failure: Callable[[], None] = lambda: None
) -> AnswerParser:
    parser = family_parser(
        CODEC,
        TagMarkup(),
        AnswerFeatures(reasoning=True, tools=True),
        end_ids=frozenset({END}),
        parse=parse,
        choice_index=0,
        stops=(),
        on_parse_failure=on_parse_failure,
    )
    for token_id in CODEC.tokenize(text):
        parser.push(token_id)
    parser.end()
    return parser


def attempt(**changes: Any) -> ParsedToolCall:
    return replace(ParsedToolCall(raw="raw", name="f", arguments={"é": 1}), **changes)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"é": 1}, '{"é": 1}'),
        ({}, "{}"),
        (None, "{}"),
        ('{"as":  "written"}', '{"as":  "written"}'),
    ],
)
def test_arguments_are_json_text_of_an_object(arguments: object, shown: str) -> None:
    parser = answer("Hi <tool_call>x</tool_call><|end|>", attempt(arguments=arguments))

    assert parser.content == "Hi"
    assert [call.arguments for call in parser.tool_calls] == [shown]


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": [1]},
        {"arguments": "[1]"},
        {"arguments": "{"},
        {"arguments": '{"a": NaN}'},
        {"arguments": {"a": float("nan")}},
        {"arguments": {"a": "\ud800"}},
        {"name": None},
        {"status": ToolCallParseStatus.UNCLOSED_BLOCK},
        {"status": ToolCallParseStatus.UNKNOWN_TOOL},
        {"status": ToolCallParseStatus.MALFORMED_STRUCTURE},
    ],
)
def test_malformed_attempts_are_shown_as_text(changes: dict[str, object]) -> None:
    parser = answer("Hi <tool_call>x</tool_call>!<|end|>", attempt(**changes))

    assert parser.content == "Hi <tool_call>x</tool_call>!"
    assert parser.tool_calls == ()


def test_a_value_that_is_no_json_is_kept() -> None:
    parser = answer("<tool_call>x", attempt(status=ToolCallParseStatus.INVALID_JSON))

    assert [call.name for call in parser.tool_calls] == ["f"]


def test_malformed_calls_and_prose_are_shown_in_their_places() -> None:
    text = "<tool_call>a</tool_call> so <tool_call>b</tool_call> end <|end|>"
    ids = CODEC.tokenize(text)
    opens = [at for at, i in enumerate(ids) if i == CODEC.special["<tool_call>"]]
    closes = [at + 1 for at, i in enumerate(ids) if i == CODEC.special["</tool_call>"]]
    good, bad = zip(opens, closes, strict=True)

    parser = answer(text, attempt(token_span=good), attempt(name=None, token_span=bad))
    assert parser.content == "so<tool_call>b</tool_call>end"
    assert len(parser.tool_calls) == 1


def test_a_malformed_call_without_a_place_is_shown_as_the_family_reports_it() -> None:
    parser = answer("<tool_call>a", attempt(), attempt(name=None, raw="?!"))

    assert parser.content == "?!"
    assert len(parser.tool_calls) == 1


def test_a_draft_without_calls_is_reasoning() -> None:
    parser = answer("<think>a <tool_call>b")

    assert (parser.content, parser.reasoning) == ("", "a <tool_call>b")


def test_markers_come_after_an_unfinished_character() -> None:
    cut = [*CODEC.tokenize("🙂")[:-1], *CODEC.tokenize("<tool_call>x")]
    parser = answer("")
    for token_id in cut:
        parser.push(token_id)
    parser.end()

    assert parser.content == "\ufffd<tool_call>x"


@pytest.mark.parametrize("error", [RecursionError, ValueError, KeyError, IndexError, TypeError])
def test_an_answer_that_the_family_cannot_parse_is_shown_as_text(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: list[int]) -> ParsedResponse:
        raise error("canary")

    failures: list[None] = []
    parser = parsed(
        "Hi <tool_call>x</tool_call>!<|end|>", fail, on_parse_failure=lambda: failures.append(None)
    )

    assert len(failures) == 1
    assert parser.content == "Hi <tool_call>x</tool_call>!"
    assert parser.tool_calls == ()
    assert error.__name__ in str([vars(record) for record in caplog.records])
    assert "canary" not in str([vars(record) for record in caplog.records])


@pytest.mark.parametrize("value", ["[" * 2000, "9" * 4400], ids=["deep", "long"])
@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("qwen3", '<tool_call>\n{"name": "f", "arguments": {"a": %s}}\n</tool_call>'),
        ("llama-3", '{"name": "f", "parameters": {"a": %s}}'),
    ],
    ids=["qwen3", "llama-3"],
)
def test_a_call_that_no_json_reader_takes_is_text(family: str, call: str, value: str) -> None:
    renderer = family_renderer(family)
    conversation = Conversation(
        messages=(Message(role="user", content="Hi"),),
        tools=(Tool(name="f", parameters={"type": "object"}),),
    )
    parser = renderer.parser(conversation, choice_index=0, stops=(), parse_tools=True)
    for token_id in renderer.tokenize(call % value):
        parser.push(token_id)
    parser.end()

    assert parser.content == call % value
    assert parser.tool_calls == ()
