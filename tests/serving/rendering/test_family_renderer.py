"""Claims about every family of `renderers`, each over a small tokenizer with its control tokens."""

import json
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.errors import ConfigError, RequestRefused
from onlinerl.serving.interaction.request import Conversation, Message, Tool, ToolCall
from onlinerl.serving.parsing.family_markup import ChannelMarkup, markup_of
from onlinerl.serving.parsing.family_splitter import ChannelSplitter
from onlinerl.serving.parsing.output_parser import AnswerParser, Part, ReasoningPart, TextPart
from onlinerl.serving.parsing.tagged_text import AnswerFeatures
from onlinerl.serving.rendering.families import detect_family
from onlinerl.serving.rendering.family_renderer import FamilyRenderer
from tests.serving.families import FAMILIES, family_renderer, family_text
from tests.serving.talking import (
    STOP,
    WEATHER,
    assistant,
    call,
    chat,
    result,
    system,
    talk,
    user,
)

ASKED = talk(system("Be brief."), user("Weather in Paris? é"), tools=(WEATHER,))

INEXACT = ("laguna-xs.2", "laguna-m.1")
"""Their bridge leaves out the line break that their template writes after an answer."""
PREFILLED = ("deepseek-r1",)
"""Reasoning is opened by the prompt, and left out of every history."""
GLM = ("glm-4.5", "glm-5", "glm-5.1", "glm-5.3")
"""An answer has no end of its own: the header of what follows ends it."""


def text_of(renderer: FamilyRenderer, ids: list[int]) -> str:
    return renderer._codec.decode_all(ids)


def written(renderer: FamilyRenderer, asked: Conversation, answer: Message) -> list[int]:
    """The tokens that a model samples for `answer`: those of the family, up to an end token."""
    inner = renderer._inner(asked.thinking)
    full = Conversation(messages=(*asked.messages, answer), tools=asked.tools)
    ids = inner.render_ids(renderer._messages(full), tools=renderer._specs(full.tools))
    prompt = renderer.render(asked)
    assert ids[: len(prompt)] == prompt
    return upto_end(renderer, ids[len(prompt) :])


def upto_end(renderer: FamilyRenderer, ids: list[int]) -> list[int]:
    ends = [at for at, token_id in enumerate(ids) if token_id in renderer.end_ids]
    return ids[: ends[-1] + 1] if ends else ids


def read(
    renderer: FamilyRenderer, asked: Conversation, ids: list[int], *, stops: tuple[str, ...] = ()
) -> AnswerParser:
    parser = renderer.parser(asked, choice_index=0, stops=stops, parse_tools=True)
    for token_id in ids:
        parser.push(token_id)
        if parser.cut_at is not None:
            break
    parser.end()
    return parser


def thinks(name: str) -> bool:
    return name not in (
        *("llama-3", "kimi-k2", "qwen3-vl", "prime-qwen3", "deepseek-v3", "deepseek-v4", "hy3"),
        *("laguna-xs-2.1", "laguna-xs.2", "laguna-m.1"),
    )


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in PREFILLED])
def test_an_answer_is_read_as_its_family_writes_it(name: str) -> None:
    renderer = family_renderer(name)
    made = call()
    said = "" if name == "llama-3" else "Let me see."
    answer = assistant(said, made, reasoning="Hm, ok." if thinks(name) else None)
    parser = read(renderer, ASKED, sampled(renderer, answer, name))

    assert parser.content == said
    assert parser.reasoning == answer.reasoning
    (got,) = parser.tool_calls
    assert (got.name, json.loads(got.arguments)) == (made.name, json.loads(made.arguments))
    assert (parser.num_reasoning_tokens > 0) == (answer.reasoning is not None)


def sampled(renderer: FamilyRenderer, answer: Message, name: str) -> list[int]:
    if name in INEXACT:
        # The template writes it within reasoning, which the prompt has closed already.
        return renderer.tokenize(
            "Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Paris</arg_value>\n</tool_call>\n</assistant>"
        )
    return written(renderer, ASKED, answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_text_comes_as_it_is_sampled(name: str) -> None:
    renderer = family_renderer(name)
    opening = renderer._markup.empty_thoughts
    texts = [opening[0] + "One two 🙂 three", opening[1] + "One two 🙂 three"]
    ids = [renderer.tokenize(text) for text in texts]
    parsers = [renderer.parser(ASKED, choice_index=0, stops=(), parse_tools=True) for _ in texts]
    # Shown before the answer ends.
    for parser, sampled_ids in zip(parsers, ids, strict=True):
        for token_id in sampled_ids:
            parser.push(token_id)

    assert "One two 🙂 three" in [parser.content for parser in parsers]


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in (*INEXACT, "deepseek-r1")])
def test_a_call_is_extended_by_its_result(name: str) -> None:
    renderer = family_renderer(name)
    made = call()
    answer = assistant("", made, reasoning="Hm, ok." if thinks(name) else None)
    known = [*renderer.render(ASKED), *written(renderer, ASKED, answer)]
    if name.startswith("glm"):
        known += renderer.tokenize("<|observation|>")
    followed = talk(*ASKED.messages, answer, result("Sunny ☀", of=made), tools=(WEATHER,))
    rest = renderer.extend(followed, num_known=3, known_ids=known)

    assert rest
    assert known + rest == renderer.render(followed)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in INEXACT])
def test_sampled_reasoning_and_text_stay_when_a_question_follows(name: str) -> None:
    renderer = family_renderer(name)
    asked = talk(user("a"))
    markup = renderer._markup
    opened = renderer._opens_reasoning(renderer._tail(None, asked.messages))
    if isinstance(markup, ChannelMarkup):
        body = "<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>b"
        body += "<|end_message|>"
    elif opened:
        body = f"hm{markup.markers.think_close}b"
    elif thinks(name):
        body = f"{markup.markers.think_open}hm{markup.markers.think_close}b"
    else:
        body = "b"
    end, *_ = renderer._inner(None).get_stop_token_ids()
    if name.startswith("glm"):
        [end] = renderer.tokenize("<|user|>")
    known = [*renderer.render(asked), *renderer.tokenize(body), end]
    followed = talk(*asked.messages, assistant("b", reasoning="hm"), user("c"))
    rest = renderer.extend(followed, num_known=2, known_ids=known)
    plain = text_of(renderer, renderer.render(talk(user("a"), assistant("b"), user("c"))))

    assert rest
    assert plain.endswith(text_of(renderer, rest))
    assert text_of(renderer, rest).count("c") >= 1


def without_thought(renderer: FamilyRenderer, name: str) -> str:
    """The beginning of an answer without reasoning."""
    if isinstance(renderer._markup, ChannelMarkup):
        return "<|content_text|>"
    opened = renderer._opens_reasoning(renderer._tail(None, ()))
    return renderer._markup.markers.think_close if opened or name == "glm-4.5" else ""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_answer_is_closed_as_its_family_does_or_rendered_anew(name: str) -> None:
    renderer = family_renderer(name)
    cut = renderer.tokenize(without_thought(renderer, name) + "bcd")
    followed = chat("a", "bcd", "e")
    rest = renderer.extend(followed, num_known=2, known_ids=[*renderer.render(chat("a")), *cut])

    _, _, after = text_of(renderer, renderer.render(followed)).rpartition("bcd")
    assert text_of(renderer, rest) == ("" if name in (*GLM, *INEXACT, "inkling") else after)


def test_a_cut_answer_of_qwen3_gets_the_end_that_the_template_writes() -> None:
    renderer = family_renderer("qwen3")
    known = [*renderer.render(chat("a")), *renderer.tokenize("bcd")]
    rest = renderer.extend(chat("a", "bcd", "e"), num_known=2, known_ids=known)

    assert text_of(renderer, rest) == (
        "<|im_end|>\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama-3"])
def test_an_answer_cut_within_its_reasoning_is_rendered_anew(name: str, dropped: bool) -> None:
    """The family's bridge would close reasoning that the model left open."""
    renderer = family_renderer(name)
    opened = renderer._opens_reasoning(renderer._tail(None, ()))
    header = "" if opened else renderer._markup.reasoning_headers[0]
    cut = renderer.tokenize(f"{header}Look first")
    parser = read(renderer, chat("a"), cut)
    answer = assistant(parser.content, reasoning=None if dropped else parser.reasoning)
    known = [*renderer.render(chat("a")), *cut]

    assert (parser.content, parser.reasoning) == ("", "Look first")
    followed = talk(user("a"), answer, user("e"))
    assert renderer.extend(followed, num_known=2, known_ids=known) == []


OTHER_ENDS = [
    *(("qwen3", "b<|endoftext|>"), ("nemotron-3", "</think>b<|endoftext|>")),
    *(("laguna-s-2.1", "</think>b〈|EOS|〉"), ("llama-3", "b<|end_of_text|>")),
    *((name, "<think></think>b<|observation|>") for name in GLM),
    *((name, "<think></think>b<|endoftext|>") for name in GLM),
    *(("gemma4", "b<|tool_response>"), ("llama-3", "b<|eom_id|>")),
    ("inkling", "<|content_text|>b<|end_message|><|endoftext|>"),
    ("inkling", "<|content_text|>b<|content_model_end_sampling|>"),
]


@pytest.mark.parametrize(("name", "sampled"), OTHER_ENDS)
def test_another_end_than_the_templates_is_rendered_anew(name: str, sampled: str) -> None:
    renderer = family_renderer(name)
    known = [*renderer.render(chat("a")), *renderer.tokenize(sampled)]

    assert renderer.extend(chat("a", "b", "c"), num_known=2, known_ids=known) == []


def test_a_call_must_end_with_the_token_that_precedes_its_result() -> None:
    renderer = family_renderer("glm-5")
    made = call("stop", '{"now": true}')
    asked = talk(user("a"), tools=(STOP,))
    body = "</think><tool_call>stop<arg_key>now</arg_key><arg_value>true</arg_value></tool_call>"
    answered = (*asked.messages, assistant("", made))

    def rest(end: str, after: Message) -> str:
        known = [*renderer.render(asked), *renderer.tokenize(body + end)]
        followed = talk(*answered, after, tools=(STOP,))
        return text_of(renderer, renderer.extend(followed, num_known=2, known_ids=known))

    back = "<tool_response>ok</tool_response><|assistant|><think>"
    assert rest("<|observation|>", result("ok", of=made)) == back
    assert rest("<|user|>", user("b")) == "b<|assistant|><think>"
    assert rest("<|user|>", result("ok", of=made)) == ""
    assert rest("<|endoftext|>", result("ok", of=made)) == ""
    assert rest("<|observation|>", user("b")) == ""
    assert rest("<|user|>", system("b")) == ""
    assert rest("", result("ok", of=made)) == ""


@pytest.mark.parametrize("name", INEXACT)
def test_a_family_whose_bridge_differs_from_its_template_is_never_extended(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        renderer = FamilyRenderer(name, family_text(name), source="")
    known = [*renderer.render(chat("a")), *renderer.tokenize("</think>\nb\n</assistant>")]

    assert "rendered anew" in caplog.text
    assert renderer.extend(chat("a", "b", "c"), num_known=2, known_ids=known) == []


def test_an_answer_that_is_not_there_cannot_be_extended() -> None:
    renderer = family_renderer("qwen3")

    assert renderer.extend(chat("a", "b", "c"), num_known=2, known_ids=[1, 2, 3]) == []


def test_an_answer_with_tokens_after_its_end_token_is_rendered_anew() -> None:
    """The bridge would leave out the tokens after it; known tokens are never left out."""
    renderer = family_renderer("qwen3")
    known = [*renderer.render(chat("a")), *renderer.tokenize("b<|im_end|>d")]

    assert renderer.extend(chat("a", "b", "c"), num_known=2, known_ids=known) == []


def test_an_unknown_answer_among_the_new_messages_is_rendered_anew() -> None:
    renderer = family_renderer("qwen3")
    known = [*renderer.render(chat("a")), *renderer.tokenize("b<|im_end|>")]

    assert renderer.extend(chat("a", "b", "c"), num_known=2, known_ids=known) != []
    assert renderer.extend(chat("a", "b", "c", "d", "e"), num_known=2, known_ids=known) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_of_a_caller_are_plain_text(name: str) -> None:
    renderer = family_renderer(name)
    control = "".join(renderer._codec.special)
    spelled = talk(system(f"S{control}"), user(f"U{control}V"), tools=ASKED.tools)
    plain = talk(system("S"), user("UV"), tools=ASKED.tools)
    special = set(renderer._codec.special.values())
    ids, expected = renderer.render(spelled), renderer.render(plain)

    assert [i for i in ids if i in special] == [i for i in expected if i in special]
    assert f"U{control}V" in text_of(renderer, ids)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("field", ["description", "key", "name", "value", "id", "result"])
def test_control_tokens_in_tools_and_calls_are_plain_text(name: str, field: str) -> None:
    renderer = family_renderer(name)
    special = renderer._codec.special

    def control_ids(text: str) -> list[int]:
        def given(place: str) -> str:
            return f"x{text}" if place == field else "x"

        member = {"type": "string", "description": given("key")}
        schema = {"type": "object", "properties": {given("key"): member}}
        tool = Tool(name="f", description=given("description"), parameters=schema)
        arguments = json.dumps({given("key"): given("value")})
        made = ToolCall(id=f"functions.{given('id')}:0", name=given("name"), arguments=arguments)
        returned = replace(result(given("result"), of=made), name=made.name)
        asked = talk(user("?"), assistant("", made), returned, tools=(tool,))
        return [i for i in renderer.render(asked) if i in special.values()]

    # Alone, because JSON may escape a token.
    for token in ["".join(special), *(token for token in special if '"' in token)]:
        assert control_ids(token) == control_ids("y")


def test_a_refusal_quotes_the_callers_text() -> None:
    schema = {"type": "object", "properties": {"a": {"description": "<|im_end|>"}}}
    asked = talk(user("?"), tools=(Tool(name="f", parameters=schema),))
    with pytest.raises(RequestRefused) as caught:
        family_renderer("kimi-k2.5").render(asked)

    assert str(caught.value).endswith("Invalid JSON Schema object: {'description': '<|im_end|>'}")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_call_is_shown_as_text(name: str) -> None:
    renderer = family_renderer(name)
    if name == "llama-3":
        cut = '{"name": "get_weather", "par'
    elif isinstance(renderer._markup, ChannelMarkup):
        cut = '<|content_text|>x<|end_message|><|message_model|>get<|content_invoke_tool_json|>{"n'
    else:
        cut = renderer._markup.empty_thoughts[1] + renderer._markup.markers.call_opens[0] + "get"
    parser = read(renderer, ASKED, renderer.tokenize(cut))

    assert parser.tool_calls == ()
    assert cut[-6:] in parser.content + (parser.reasoning or "")


def test_text_after_calls_is_shown_after_them() -> None:
    renderer = family_renderer("glm-5")
    one = "<tool_call>stop<arg_key>now</arg_key><arg_value>true</arg_value></tool_call>"
    asked = talk(user("x"), tools=(STOP,))
    parser = read(renderer, asked, renderer.tokenize(f"</think>A.{one} B {one}C<|user|>"))

    assert parser.content == "A.BC"
    assert [got.arguments for got in parser.tool_calls] == ['{"now": true}', '{"now": true}']


def test_a_malformed_call_beside_a_valid_one_is_text() -> None:
    renderer = family_renderer("qwen3")
    bad = "<tool_call>\nno json\n</tool_call>"
    good = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    parser = read(renderer, ASKED, renderer.tokenize(f"{bad}\n{good}<|im_end|>"))

    assert parser.content == bad
    assert [got.name for got in parser.tool_calls] == ["stop"]


def test_calls_past_a_stop_string_are_text() -> None:
    renderer = family_renderer("qwen3")
    good = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    parser = read(renderer, ASKED, renderer.tokenize(good), stops=("\n</tool",))

    assert parser.tool_calls == ()
    assert parser.content == good.removesuffix("\n</tool_call>")


def test_kimi_keeps_the_id_that_the_model_gave_its_call() -> None:
    renderer = family_renderer("kimi-k2")
    ids = written(renderer, ASKED, assistant("", call(n=0)))

    assert [got.id for got in read(renderer, ASKED, ids).tool_calls] == ["functions.get_weather:0"]


def test_without_tools_call_markup_is_text() -> None:
    renderer = family_renderer("qwen3")
    good = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    parser = read(renderer, talk(user("x")), renderer.tokenize(f"{good}<|im_end|>"))

    assert (parser.content, parser.tool_calls) == (good, ())


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_any_sampled_ids_are_read(name: str, data: st.DataObject) -> None:
    renderer = family_renderer(name)
    size = renderer._codec.tokenizer.get_vocab_size()
    added = sorted(renderer._codec.added.values())
    token_ids = st.integers(min_value=0, max_value=size - 1) | st.sampled_from(added)
    ids = data.draw(st.lists(token_ids, max_size=25))
    parser = renderer.parser(ASKED, choice_index=0, stops=(), parse_tools=True)
    pieces = [piece for token_id in ids for piece in parser.push(token_id)]
    pieces += parser.end()

    assert parser.content == "".join(getattr(piece, "text", "") for piece in pieces) or (
        parser.reasoning is not None
    )


def test_reasoning_is_switched_where_the_family_can() -> None:
    renderer = family_renderer("qwen3")

    off = text_of(renderer, renderer.render(talk(user("a"), thinking=False)))
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(RequestRefused, match="cannot be switched off") as caught:
        family_renderer("deepseek-r1").render(talk(user("a"), thinking=False))
    assert caught.value.param == "thinking"
    with pytest.raises(RequestRefused, match="cannot be switched on"):
        family_renderer("llama-3").render(talk(user("a"), thinking=True))
    assert family_renderer("llama-3").render(talk(user("a"), thinking=False))


@pytest.mark.parametrize(
    ("name", "alike"),
    [("gemma4", False), ("glm-4.5", False), ("qwen3.8", False)]
    + [(name, True) for name in ("qwen3", "qwen3.5", "glm-5", "deepseek-v4", "laguna-s-2.1")],
)
def test_a_switch_that_is_written_into_a_message_tells_prompts_apart(
    name: str, alike: bool
) -> None:
    """The beginnings of this and earlier answers do not count."""
    renderer = family_renderer(name)
    asked = talk(system("s"), user("a"), assistant("b"), user("c"), thinking=True)

    assert renderer.is_same_prompt(asked, thinking=False) is alike


def test_prompts_differ_under_a_switch_that_the_family_does_not_have() -> None:
    assert not family_renderer("llama-3").is_same_prompt(chat("a"), thinking=True)


def test_messages_that_a_family_cannot_write_are_refused() -> None:
    two = assistant("", call(), call("stop", "{}", n=1))

    with pytest.raises(RequestRefused, match="llama-3 refuses") as caught:
        family_renderer("llama-3").render(talk(user("a"), two, tools=(WEATHER, STOP)))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_the_hash_names_family_tokenizer_and_tools() -> None:
    renderer = family_renderer("qwen3")
    names = [
        renderer.name(()),
        renderer.name((WEATHER,)),
        family_renderer("qwen3.5").name(()),
        FamilyRenderer("qwen3", family_text("qwen3-vl"), source="").name(()),
    ]

    assert names[0] == FamilyRenderer("qwen3", family_text("qwen3"), source="").name(())
    assert len({name.hash for name in names}) == 4
    assert names[0].name == "qwen3"


def test_a_tokenizer_without_the_tokens_of_a_family_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not fit the tokenizer"):
        FamilyRenderer("glm-5", family_text("qwen3"), source="")


def test_families_are_found_by_the_exact_id_of_a_model() -> None:
    assert detect_family("Qwen/Qwen3-8B") == "qwen3"
    assert detect_family("somebody/Qwen3-8B-tuned") is None


def harmony(text: str, *, tools: bool = True, cuts: bool = False) -> list[Part]:
    markup = markup_of("gpt-oss")
    assert isinstance(markup, ChannelMarkup)
    splitter = ChannelSplitter(
        AnswerFeatures(reasoning=True, starts_reasoning=True, tools=tools),
        markup,
        read_calls=lambda held: [ToolCall(id="1", name="held", arguments=held)],
    )
    parts = [part for piece in (text if cuts else [text]) for part in splitter.push(piece)]
    parts = [*parts, *splitter.end()]
    said = "".join(part.text for part in parts if isinstance(part, TextPart))
    thought = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return [
        *([ReasoningPart(thought)] if thought else []),
        *([TextPart(said)] if said else []),
        *calls,
    ]


@pytest.mark.parametrize("cuts", [False, True])
def test_headers_name_the_channel_of_a_message(cuts: bool) -> None:
    start = "<|start|>assistant"
    tool = f"{start}<|channel|>commentary to=functions.f<|constrain|>json<|message|>{{}}<|call|>"

    assert harmony(f"hm<|end|>{start}<|channel|>final<|message|>Hi <b><|return|>", cuts=cuts) == [
        ReasoningPart("hm"),
        TextPart("Hi <b>"),
    ]
    assert harmony(f"hm<|end|>{tool}", cuts=cuts) == [
        ReasoningPart("hm"),
        ToolCall(id="1", name="held", arguments=tool),
    ]
    assert harmony("hm", cuts=cuts) == [ReasoningPart("hm")]
    assert harmony(f"<|end|>{tool}", tools=False, cuts=cuts) == [
        TextPart(tool.removesuffix("<|call|>"))
    ]
