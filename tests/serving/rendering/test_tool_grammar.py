"""Grammars of calls, run by the library that vLLM runs them with."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from onlinerl.errors import RequestRefused
from onlinerl.serving.interaction.request import Tool, ToolChoice
from onlinerl.serving.parsing.output_parser import AnswerParser
from onlinerl.serving.rendering.family_renderer import FamilyRenderer
from tests.serving.families import FAMILIES, family_renderer
from tests.serving.talking import talk, user

xgrammar = pytest.importorskip("xgrammar", reason="comes with vLLM")

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
STOP = Tool(
    name="stop",
    parameters={
        "type": "object",
        "properties": {"now": {"type": "boolean"}},
        "required": ["now"],
        "additionalProperties": False,
    },
)
REQUIRED = ToolChoice(mode="required")
NO_GRAMMAR = ("deepseek-v4", "gemma4", "hy3", "inkling")
SPELLED_ARGUMENTS = ("glm", "laguna")
"""Their argument markers are tokens of their own, which the grammar takes as text."""


def compiled(renderer: FamilyRenderer, grammar: Mapping[str, object]) -> Any:
    tokenizer = renderer._codec.tokenizer
    vocabulary = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    info = xgrammar.TokenizerInfo(
        vocabulary,
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        stop_token_ids=sorted(renderer.end_ids),
    )
    return xgrammar.GrammarCompiler(info).compile_structural_tag(grammar["structural_tag"])


def allowed(matcher: Any, size: int) -> list[int]:
    mask = xgrammar.allocate_token_bitmask(1, size)
    matcher.fill_next_token_bitmask(mask)
    words = mask[0].tolist()
    return [i for i in range(size) if words[i // 32] >> (i % 32) & 1]


def walk(renderer: FamilyRenderer, grammar: Any, *, seed: int, max_tokens: int = 400) -> list[int]:
    """A random answer under a grammar; it ends as soon as the grammar allows."""
    matcher, rng, ids = xgrammar.GrammarMatcher(grammar), random.Random(seed), list[int]()
    while not matcher.is_terminated() and len(ids) < max_tokens:
        choices = allowed(matcher, renderer._codec.tokenizer.get_vocab_size())
        ends = [token_id for token_id in choices if token_id in renderer.end_ids]
        ids.append(rng.choice(ends if ends and rng.random() < 0.6 else choices))
        assert matcher.accept_token(ids[-1])
    return ids if matcher.is_terminated() else []


def read(renderer: FamilyRenderer, ids: list[int]) -> AnswerParser:
    asked = talk(user("x"), tools=(WEATHER, STOP))
    parser = renderer.parser(asked, choice_index=0, stops=(), parse_tools=True)
    opened = renderer._opens_reasoning(renderer._tail(None, asked.messages))
    closing = renderer._markup.empty_thoughts[1] if opened else ""
    for token_id in [*renderer.tokenize(closing), *ids]:
        parser.push(token_id)
    parser.end()
    return parser


def obeys(name: str, arguments: str) -> bool:
    given = json.loads(arguments)
    if name == "stop":
        return list(given) == ["now"] and isinstance(given["now"], bool)
    return given["city"].strip() in ("Paris", "Rome") and isinstance(given["days"], int)


ENFORCED = [
    name for name in FAMILIES if name not in NO_GRAMMAR and not name.startswith(SPELLED_ARGUMENTS)
]


@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice(mode="required", parallel=False)])
@pytest.mark.parametrize("name", ENFORCED)
def test_a_model_that_knows_nothing_writes_valid_calls(name: str, choice: ToolChoice) -> None:
    renderer = family_renderer(name)
    grammar = renderer.tool_grammar((WEATHER, STOP), choice)
    assert grammar is not None
    form = compiled(renderer, grammar)
    answers = [ids for seed in range(6) if (ids := walk(renderer, form, seed=seed))]

    assert answers
    for ids in answers:
        parser = read(renderer, ids)
        assert parser.content == ""
        assert parser.tool_calls
        assert all(obeys(made.name, made.arguments) for made in parser.tool_calls)
        assert choice.parallel or len(parser.tool_calls) == 1
        assert ids[-1] in renderer.end_ids


def accepts(renderer: FamilyRenderer, form: Any, text: str) -> bool:
    """Whether `text` and then the end of the answer may be sampled."""
    matcher = xgrammar.GrammarMatcher(form)
    for token_id in renderer.tokenize(text):
        if not matcher.accept_token(token_id):
            return False
    size = renderer._codec.tokenizer.get_vocab_size()
    return bool(renderer.end_ids & set(allowed(matcher, size)))


CANONICAL = {
    "qwen3": '<tool_call>\n{"name": "stop", "arguments": {"now": true}}\n</tool_call>',
    "qwen3.5": (
        "<tool_call>\n<function=stop>\n<parameter=now>\ntrue\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "glm-4.5": (
        "<tool_call>stop\n<arg_key>now</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
    ),
    "glm-5": "<tool_call>stop<arg_key>now</arg_key><arg_value>true</arg_value></tool_call>",
    "llama-3": '{"name": "stop", "parameters": {"now": true}}',
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="stop">\n<parameter name="now">true</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    ),
}


@pytest.mark.parametrize("name", CANONICAL)
def test_the_grammar_enforces_the_familys_spelling_of_a_call(name: str) -> None:
    renderer = family_renderer(name)
    named = renderer.tool_grammar((WEATHER, STOP), ToolChoice(mode="required", name="stop"))
    assert named is not None
    form, text = compiled(renderer, named), CANONICAL[name]

    assert accepts(renderer, form, text)
    assert not accepts(renderer, form, text.replace("true", "1"))
    assert not accepts(renderer, form, text.replace("stop", "get_weather"))
    assert not accepts(renderer, form, f"Sure. {text}")
    assert not accepts(renderer, form, f"{text} Done.")
    assert not accepts(renderer, form, "")


def test_several_calls_only_where_they_may_be() -> None:
    renderer = family_renderer("qwen3")
    two = CANONICAL["qwen3"] + "\n" + CANONICAL["qwen3"]
    many = renderer.tool_grammar((STOP,), REQUIRED)
    one = renderer.tool_grammar((STOP,), ToolChoice(mode="required", parallel=False))
    assert many is not None
    assert one is not None

    assert accepts(renderer, compiled(renderer, many), two)
    assert not accepts(renderer, compiled(renderer, one), two)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "llama-3", "kimi-k2", "deepseek-v3"])
def test_arguments_of_strict_tools_are_enforced_where_the_model_calls(name: str) -> None:
    renderer = family_renderer(name)
    strict = Tool(name="stop", parameters=STOP.parameters, strict=True)
    grammar = renderer.tool_grammar((strict, WEATHER), ToolChoice())
    assert grammar is not None
    form = compiled(renderer, grammar)

    assert accepts(renderer, form, "Just text.")
    if name in CANONICAL:
        assert accepts(renderer, form, f"Sure. {CANONICAL[name]}")
        assert not accepts(renderer, form, CANONICAL[name].replace("true", "1"))


def test_other_tools_beside_strict_ones_take_any_object() -> None:
    renderer = family_renderer("qwen3")
    strict = Tool(name="stop", parameters=STOP.parameters, strict=True)
    grammar = renderer.tool_grammar((strict, WEATHER), ToolChoice())
    assert grammar is not None

    loose = '<tool_call>\n{"name": "get_weather", "arguments": {"x": [1, "a"]}}\n</tool_call>'
    assert accepts(renderer, compiled(renderer, grammar), loose)


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ((), REQUIRED),
        ((WEATHER,), ToolChoice()),
        ((WEATHER,), ToolChoice(mode="none")),
        ((Tool(name="x", strict=True),), ToolChoice(mode="none")),
    ],
)
def test_nothing_is_forced_where_nothing_must_be(
    tools: tuple[Tool, ...], choice: ToolChoice
) -> None:
    assert family_renderer("qwen3").tool_grammar(tools, choice) is None
    assert family_renderer("gemma4").tool_grammar(tools, choice) is None


def test_a_name_that_is_no_tool_is_refused() -> None:
    with pytest.raises(RequestRefused, match="'other'") as caught:
        family_renderer("qwen3").tool_grammar((STOP,), ToolChoice(mode="required", name="other"))
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


@pytest.mark.parametrize("name", NO_GRAMMAR)
def test_a_family_whose_calls_cannot_be_enforced_says_so(name: str) -> None:
    renderer = family_renderer(name)

    with pytest.raises(RequestRefused, match="tool_choice auto or none") as caught:
        renderer.tool_grammar((STOP,), REQUIRED)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")
    with pytest.raises(RequestRefused, match="leave out strict") as caught:
        renderer.tool_grammar((Tool(name="x", strict=True),), ToolChoice())
    assert caught.value.param == "tools"
