import json
from collections.abc import Iterator, Sequence
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.serving.interaction.pieces import (
    ArgumentsDelta,
    Piece,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)
from onlinerl.serving.interaction.request import ToolCall
from onlinerl.serving.parsing import hermes
from onlinerl.serving.parsing.hermes_splitter import HermesSplitter
from onlinerl.serving.parsing.output_parser import (
    AnswerParser,
    Part,
    PlainSplitter,
    ReasoningPart,
    TextPart,
    new_call_id,
)
from onlinerl.serving.parsing.tagged_text import AnswerFeatures
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from onlinerl.serving.tokens.decoder import TextStream
from tests.serving.talking import WEATHER, talk, user

WRITTEN = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
CALL = f"<tool_call>\n{WRITTEN}\n</tool_call>"
EVERYTHING = AnswerFeatures(reasoning=True, tools=True)


def numbered() -> Iterator[str]:
    return (f"call_{n}" for n in count())


def read(pieces: Sequence[str], expected: AnswerFeatures = EVERYTHING) -> list[Part]:
    """Parts of a text that comes in pieces, those of one kind joined."""
    splitter = HermesSplitter(expected, new_id=numbered().__next__)
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return joined([*parts, *splitter.end()])


def joined(parts: Sequence[Part]) -> list[Part]:
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            whole[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            whole[-1] = ReasoningPart(last.text + part.text)
        else:
            whole.append(part)
    return whole


def made(n: int = 0, arguments: str = '{"city": "Paris"}') -> ToolCall:
    return ToolCall(id=f"call_{n}", name="get_weather", arguments=arguments)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hi there. ", [TextPart("Hi there. ")]),
        (CALL, [made()]),
        (f"Sure.\n\n{CALL}", [TextPart("Sure."), made()]),
        (f"{CALL}\n{CALL}\n", [made(0), made(1)]),
        (f"{CALL}{CALL}", [made(0), made(1)]),
        (f"{CALL}\nDone.", [made(), TextPart("Done.")]),
        (f"<tool_call>{WRITTEN}</tool_call>", [made()]),
        ("<think>\nhm\n\n</think>\n\nHi", [ReasoningPart("hm"), TextPart("Hi")]),
        ("\n<think>hm</think>Hi", [ReasoningPart("hm"), TextPart("Hi")]),
        ("<think>\n\n</think>\n\nHi", [TextPart("Hi")]),
        (f"<think>hm</think>\n{CALL}", [ReasoningPart("hm"), made()]),
        (f"<think>{CALL}? no</think>Hi", [ReasoningPart(f"{CALL}? no"), TextPart("Hi")]),
        (f"<think>hm\n{CALL}", [ReasoningPart("hm"), made()]),
        ("<think>hm\n<tool_call>x", [ReasoningPart("hm\n<tool_call>x")]),
        ("<think>hm\n", [ReasoningPart("hm\n")]),
        ("a <think>b</think>", [TextPart("a <think>b</think>")]),
        ("  ", [TextPart("  ")]),
        ("<thin", [TextPart("<thin")]),
        ("", []),
    ],
)
def test_answers_are_split_into_text_reasoning_and_calls(text: str, parts: list[Part]) -> None:
    assert read([text]) == parts
    assert read(list(text)) == parts


@pytest.mark.parametrize(
    "text",
    [
        "x <tool_call>",
        "x <tool_call>\n" + WRITTEN,
        f"x <tool_call>\n{WRITTEN}\n</tool_cal",
        "<tool_call>\nnot json\n</tool_call> y",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"} {"name": "g"}</tool_call>',
        '<tool_call>{"name": "f",}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "open</tool_call>',
        "</tool_call>",
        "<tool_call",
        "<<<tool_call",
    ],
)
def test_malformed_calls_are_shown_as_text(text: str) -> None:
    assert read([text]) == [TextPart(text)]
    assert read(list(text)) == [TextPart(text)]


def test_arguments_are_shown_as_they_were_written() -> None:
    arguments = '{ "b":1,\n"a" : "\\u00e9</tool_call>" }'
    parts = read(list(f'<tool_call>{{"arguments":{arguments}, "name" :"get_weather"}}</tool_call>'))

    assert parts == [made(arguments=arguments)]
    assert json.loads(arguments) == {"b": 1, "a": "é</tool_call>"}


def test_a_call_without_arguments_has_none() -> None:
    assert read(['<tool_call>{"name": "get_weather"}</tool_call>']) == [made(arguments="{}")]


def test_markers_within_an_argument_are_not_read_as_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    read_call = hermes.read_call

    def counted(text: str) -> hermes.WrittenCall | None:
        tried.append(text)
        return read_call(text)

    monkeypatch.setattr(hermes, "read_call", counted)
    inside = r"\"" + "</tool_call>" * 3000
    arguments = f'{{"a": "{inside}"}}'
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'

    assert read([text]) == [made(arguments=arguments)]
    assert len(tried) == 1


def test_a_draft_may_hold_any_number_of_markers() -> None:
    draft = '<tool_call>\n{"name": "' + "</tool_call>" * 3000

    assert read([f"<think>hm{draft}"]) == [ReasoningPart(f"hm{draft}")]


def test_a_malformed_call_does_not_spoil_the_next() -> None:
    assert read([f"<tool_call>no</tool_call>\n{CALL}"]) == [
        TextPart("<tool_call>no</tool_call>"),
        made(),
    ]


def test_markup_is_text_where_it_is_not_expected() -> None:
    text = f"<think>a</think> {CALL}"

    assert read([text], AnswerFeatures()) == [TextPart(text)]
    assert read([text], AnswerFeatures(reasoning=True)) == [
        ReasoningPart("a"),
        TextPart(f" {CALL}"),
    ]


def test_an_answer_may_begin_within_reasoning() -> None:
    opened = AnswerFeatures(reasoning=True, starts_reasoning=True)

    assert read(["\nhm\n</think>\n\nHi"], opened) == [ReasoningPart("hm"), TextPart("Hi")]
    assert read(["hm"], opened) == [ReasoningPart("hm")]
    assert read(["</think>Hi"], opened) == [TextPart("Hi")]


def test_text_is_held_back_only_while_it_may_be_markup() -> None:
    splitter = HermesSplitter(AnswerFeatures(tools=True))

    assert splitter.push("Hello <") == [TextPart("Hello")]
    assert splitter.push("b> ") == [TextPart(" <b>")]
    assert splitter.push("\n<tool_call>{") == []
    assert splitter.push("}</tool_call") == []
    assert splitter.push("> x") == [TextPart(" \n<tool_call>{}</tool_call>"), TextPart(" x")]


PIECES = st.sampled_from(
    [
        *("a", " ", "\n", "<", ">", "</", '"', "\\", "{", "}", "tool_call", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", WRITTEN, CALL, '{"name": "f", "arguments": {"x": "'),
    ]
)


@st.composite
def texts_in_pieces(draw: st.DrawFn) -> list[str]:
    text = "".join(draw(st.lists(PIECES, max_size=12)))
    cuts = draw(st.lists(st.integers(min_value=0, max_value=len(text)), max_size=8))
    return [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]


@given(
    pieces=texts_in_pieces(),
    expected=st.builds(
        AnswerFeatures, reasoning=st.booleans(), starts_reasoning=st.booleans(), tools=st.booleans()
    ),
)
def test_parts_do_not_depend_on_where_the_text_is_cut(
    pieces: list[str], expected: AnswerFeatures
) -> None:
    assert read(pieces, expected) == read(["".join(pieces)], expected)


@given(pieces=texts_in_pieces())
def test_without_calls_and_reasoning_all_text_is_shown(pieces: list[str]) -> None:
    text = "".join(pieces)
    parts = read(pieces, AnswerFeatures(tools=True))

    called = any(isinstance(part, ToolCall) for part in parts)
    assert called or parts == ([TextPart(text)] if text else [])


@given(pieces=texts_in_pieces())
def test_nothing_vanishes_but_markup_and_the_space_around_it(pieces: list[str]) -> None:
    """The parts, with calls spelled again and without white space, give the whole text."""
    shown = "".join(
        written(part) if isinstance(part, ToolCall) else part.text
        for part in read(pieces, AnswerFeatures(tools=True))
    )

    assert "".join(shown.split()) == "".join("".join(pieces).split())


def written(call: ToolCall) -> str:
    return f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'


@given(
    members=st.dictionaries(
        st.text(max_size=4),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), st.lists),
        max_size=3,
    ),
    indent=st.sampled_from([None, 1]),
    escape=st.booleans(),
)
def test_any_json_object_is_read_as_it_was_written(
    members: dict[str, object], indent: int | None, escape: bool
) -> None:
    arguments = json.dumps(members, indent=indent, ensure_ascii=escape)
    written = json.dumps({"name": "f", "x": members}, ensure_ascii=escape)
    call = hermes.read_call(f'{written[:-1]}, "arguments" : {arguments} }}')

    assert call == hermes.WrittenCall(name="f", arguments=arguments)


@given(st.text(max_size=30))
def test_reading_a_call_never_fails(text: str) -> None:
    call = hermes.read_call(text)

    assert call is None or isinstance(json.loads(call.arguments), dict)


def test_a_deeply_nested_call_is_no_call() -> None:
    assert hermes.read_call('{"name": "f", "arguments": ' + '{"a":' * 100_000) is None
    deep = '{"a":' * 200 + "1" + "}" * 200
    assert hermes.read_call(f'{{"name": "f", "arguments": {deep}}}') is None


@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "f", "arguments": {"a": NaN}}',
        r'{"name": "f", "arguments": {"a": 1e999}}',
        r'{"name": "f", "arguments": {"a": "\ud800"}}',
        r'{"name": "f\ud800", "arguments": {}}',
    ],
)
def test_a_call_that_no_client_could_read_or_send_back_is_no_call(call: str) -> None:
    assert hermes.read_call(call) is None


def answer(
    renderer: TemplateRenderer,
    ids: Sequence[int],
    *,
    stops: Sequence[str] = (),
    parse_tools: bool = True,
) -> tuple[AnswerParser, list[Piece]]:
    parser = renderer.parser(
        talk(user("x"), tools=(WEATHER,)), choice_index=3, stops=stops, parse_tools=parse_tools
    )
    pieces: list[Piece] = []
    for token_id in ids:
        pieces += parser.push(token_id)
        if parser.cut_at is not None:
            break
    return parser, [*pieces, *parser.end()]


def test_a_streamed_answer_is_the_whole_one(chatml: TemplateRenderer) -> None:
    ids = chatml.tokenize(f"<think>\nhé🙂\n</think>\n\nSure 🙂.\n{CALL}<|im_end|>")
    parser, pieces = answer(chatml, ids)

    assert {piece.choice_index for piece in pieces} == {3}
    assert "".join(p.text for p in pieces if isinstance(p, TextDelta)) == "Sure 🙂."
    assert "".join(p.text for p in pieces if isinstance(p, ReasoningDelta)) == "hé🙂"
    starts = [p for p in pieces if isinstance(p, ToolCallStart)]
    assert [(p.call_index, p.name) for p in starts] == [(0, "get_weather")]
    assert [p.json for p in pieces if isinstance(p, ArgumentsDelta)] == ['{"city": "Paris"}']
    assert (parser.content, parser.reasoning) == ("Sure 🙂.", "hé🙂")
    (call,) = parser.tool_calls
    assert call.id == starts[0].id
    assert parser.num_reasoning_tokens == len(chatml.tokenize("<think>\nhé🙂\n</think>"))


def test_ids_of_calls_differ() -> None:
    first, second = new_call_id(), new_call_id()

    assert first != second
    assert first.startswith("call_")
    assert len(first) == len("call_") + 24


def test_an_answer_without_reasoning_has_none(chatml: TemplateRenderer) -> None:
    parser, _ = answer(chatml, chatml.tokenize("Hi"))

    assert parser.reasoning is None
    assert parser.num_reasoning_tokens == 0


def test_calls_are_text_where_the_caller_does_not_want_them(chatml: TemplateRenderer) -> None:
    parser, _ = answer(chatml, chatml.tokenize(CALL), parse_tools=False)

    assert parser.content == CALL
    assert parser.tool_calls == ()


def test_a_raw_prompt_is_answered_with_plain_text(chatml: TemplateRenderer) -> None:
    text = f"<think>a</think> {CALL}"
    parser = chatml.parser(None, choice_index=0, stops=(), parse_tools=True)
    for token_id in chatml.tokenize(text):
        parser.push(token_id)
    parser.end()

    assert parser.content == text


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("Hello END now", "END", "Hello "),
        (f"a {CALL} b", "Paris", 'a <tool_call>\n{"name": "get_weather", "arguments": {"city": "'),
        (f"a {CALL} b", " b", "a"),
        ("a <tool_call", "_call", "a <tool"),
    ],
)
def test_a_stop_string_cuts_sampled_text_and_markup(
    chatml: TemplateRenderer, text: str, stop: str, content: str
) -> None:
    """The engine looks for it in the sampled text, markup included; a cut call is text."""
    parser, _ = answer(chatml, chatml.tokenize(text), stops=[stop])

    assert parser.cut_at == stop
    assert parser.content == content


def test_a_stop_string_may_end_reasoning(chatml: TemplateRenderer) -> None:
    parser, _ = answer(chatml, chatml.tokenize("<think>one two"), stops=[" two"])

    assert (parser.content, parser.reasoning) == ("", "one")


@given(ids=st.lists(st.integers(min_value=0, max_value=49151), max_size=40))
def test_any_ids_give_their_text(renderer: TemplateRenderer, ids: list[int]) -> None:
    parser = renderer.parser(
        talk(user("x"), tools=(WEATHER,)), choice_index=0, stops=(), parse_tools=True
    )
    for token_id in ids:
        parser.push(token_id)
    parser.end()

    assert parser.content == renderer.decode(ids)


@given(
    ids=st.lists(st.integers(min_value=0, max_value=49151), max_size=30),
    stop=st.text(alphabet="aeiou th", min_size=1, max_size=3),
)
def test_any_ids_are_cut_at_the_first_stop_string(
    renderer: TemplateRenderer, ids: list[int], stop: str
) -> None:
    parser, _ = answer(renderer, ids, stops=[stop])
    text = renderer.decode(ids)

    assert parser.content == text.partition(stop)[0]
    assert (parser.cut_at is not None) == (stop in text)


def test_the_cost_of_a_token_does_not_grow_with_the_answer(renderer: TemplateRenderer) -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return renderer.decode(ids)

    parser = AnswerParser(TextStream(decode), PlainSplitter(), choice_index=0, stops=["zzz"])
    for token_id in renderer.tokenize("word 你🙂 " * 300):
        parser.push(token_id)

    assert max(decoded) < 12
