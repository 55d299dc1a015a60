"""Our renderers against `apply_chat_template` of transformers, at every turn of conversations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from onlinerl.serving.interaction.request import Conversation, Message, ToolCall
from onlinerl.serving.rendering.chat_template import ChatTemplate, ModelText
from onlinerl.serving.rendering.family_renderer import FamilyRenderer
from onlinerl.serving.rendering.template_messages import tool_specs
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.families import family_text
from tests.serving.talking import STOP, WEATHER, assistant, call, result, system, talk, user

TEMPLATES = Path(__file__).parent / "templates"
BOS = "<|begin_of_text|>"


class Both(Protocol):
    def render(self, conversation: Conversation) -> list[int]: ...

    def extend(
        self, conversation: Conversation, *, num_known: int, known_ids: Sequence[int]
    ) -> list[int]: ...


def reference(text: ModelText) -> Any:
    """The tokenizer as transformers wraps it."""
    assert text.template is not None
    special = {"bos_token": BOS} if text.tokenizer.token_to_id(BOS) is not None else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=text.tokenizer, chat_template=text.template.source, **special
    )


def golden(tokenizer: Any, conversation: Conversation, *, answered: bool = False) -> list[int]:
    """Ids by transformers; with an opened answer, unless the last message is one."""
    switch = {} if conversation.thinking is None else {"enable_thinking": conversation.thinking}
    ids: list[int] = tokenizer.apply_chat_template(
        [openai(message) for message in conversation.messages],
        tools=tool_specs(conversation.tools) or None,
        add_generation_prompt=not answered,
        return_dict=False,
        **switch,
    )
    return ids


def openai(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [function(made) for made in message.tool_calls]
    return plain


def function(made: ToolCall) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": made.name, "arguments": json.loads(made.arguments)},
    }


def known_after(
    tokenizer: Any, conversation: Conversation, prompt: list[int], end: int
) -> list[int]:
    """Prompt and answer as they were sampled: up to the token that ends the answer."""
    whole = golden(tokenizer, conversation, answered=True)
    assert whole[: len(prompt)] == prompt
    last = max(at for at, token_id in enumerate(whole) if token_id == end)
    return whole[: last + 1]


def check_every_turn(renderer: Both, tokenizer: Any, conversation: Conversation, end: int) -> None:
    """Every prompt equals the golden one, rendered whole and extended from the turn before."""
    known: list[int] = []
    num_known = 0
    for at, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        asked = Conversation(
            messages=conversation.messages[:at],
            tools=conversation.tools,
            thinking=conversation.thinking,
        )
        prompt = golden(tokenizer, asked)
        assert renderer.render(asked) == prompt
        if known:
            rest = renderer.extend(asked, num_known=num_known, known_ids=known)
            assert known + rest == prompt
        answered = Conversation(
            messages=conversation.messages[: at + 1],
            tools=conversation.tools,
            thinking=conversation.thinking,
        )
        known, num_known = known_after(tokenizer, answered, prompt, end), at + 1


FIRST, SECOND = call(), call("stop", '{"now": true}', n=1)
DONE = assistant("Done.")
PLAIN = [
    talk(user("Hi"), assistant("Hello."), user("Bye"), DONE),
    talk(system("Be brief. é"), user("Hi\n\n"), assistant("Ünï ☀ 🙂"), user("\n?"), DONE),
    talk(user(""), assistant(""), user(" "), assistant("x"), user("<b>&amp;</b>"), DONE),
]
CALLED = [
    talk(user("Hi"), assistant("Hello."), user("Bye"), DONE, tools=(WEATHER, STOP)),
    talk(
        *(system("S"), user("Weather?"), assistant("", FIRST), result("Sunny ☀", of=FIRST)),
        *(assistant("It is sunny."), user("Thanks"), DONE),
        tools=(WEATHER, STOP),
    ),
    talk(
        *(user("W"), assistant("", FIRST), result("", of=FIRST), assistant("", SECOND)),
        *(result('{"ok": "é\\n"}', of=SECOND), assistant("Done."), user("x"), DONE),
        tools=(STOP, WEATHER),
    ),
]
PARALLEL = [
    talk(
        *(user("W"), assistant("Both.", FIRST, SECOND), result("a", of=FIRST)),
        *(result("b", of=SECOND), assistant("Done."), user("x"), DONE),
        tools=(WEATHER, STOP),
    ),
]


@pytest.mark.parametrize("conversation", PLAIN)
def test_smollm2_is_rendered_as_transformers_does(
    smollm2_dir: Path, renderer: TemplateRenderer, conversation: Conversation
) -> None:
    check_every_turn(renderer, AutoTokenizer.from_pretrained(smollm2_dir), conversation, end=2)


def golden_chatml() -> ModelText:
    return family_text("qwen3", (TEMPLATES / "chatml_with_tools.jinja").read_text())


def golden_headers() -> ModelText:
    text = family_text("llama-3")
    source = (TEMPLATES / "headers_with_tools.jinja").read_text()
    template = ChatTemplate(source, special_tokens={"bos_token": BOS})
    return ModelText(tokenizer=text.tokenizer, template=template, end_ids=frozenset())


CHATML, HEADERS = golden_chatml(), golden_headers()
RENDERERS: dict[str, tuple[Both, ModelText]] = {
    "chatml": (TemplateRenderer(CHATML, kind="chatml"), CHATML),
    "qwen3": (FamilyRenderer("qwen3", CHATML, source=""), CHATML),
    "chat_template": (TemplateRenderer(HEADERS), HEADERS),
    "llama-3": (FamilyRenderer("llama-3", HEADERS, source=""), HEADERS),
}
ENDS = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>"}


def id_of(text: ModelText, token: str) -> int:
    token_id: int = text.tokenizer.get_vocab()[token]
    return token_id


def check(name: str, conversation: Conversation) -> None:
    renderer, text = RENDERERS[name]
    end = id_of(text, ENDS.get(name, "<|eot_id|>"))
    check_every_turn(renderer, reference(text), conversation, end)


def without_think(text: ModelText) -> ModelText:
    """The same form without reasoning, whose answers hold what the template writes later."""
    assert text.template is not None
    source = text.template.source.replace("loop.index0 > ns.last_query", "false")
    template = ChatTemplate(source, special_tokens={})
    return ModelText(tokenizer=text.tokenizer, template=template, end_ids=frozenset())


QUIET = without_think(CHATML)
RENDERERS["chatml without reasoning"] = (TemplateRenderer(QUIET, kind="chatml"), QUIET)
ENDS["chatml without reasoning"] = "<|im_end|>"


@pytest.mark.parametrize("conversation", [*PLAIN, *CALLED, *PARALLEL])
def test_chatml_with_tools_is_rendered_and_extended_as_transformers_does(
    conversation: Conversation,
) -> None:
    check("chatml without reasoning", conversation)


@pytest.mark.parametrize("conversation", PLAIN)
@pytest.mark.parametrize("name", ["chat_template", "llama-3"])
def test_header_roles_are_rendered_and_extended_as_transformers_does(
    name: str, conversation: Conversation
) -> None:
    check(name, conversation)


@pytest.mark.parametrize("conversation", CALLED)
def test_calls_of_llama_3_are_rendered_and_extended_as_transformers_does(
    conversation: Conversation,
) -> None:
    check("llama-3", conversation)


THOUGHT = talk(
    *(user("W"), assistant("", FIRST, reasoning="hm\nok"), result("a", of=FIRST)),
    *(assistant("", SECOND, reasoning="so ☀"), result("b", of=SECOND)),
    assistant("Done.", reasoning="well"),
    tools=(WEATHER, STOP),
)


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_reasoning_within_a_run_of_calls_is_rendered_as_transformers_does(name: str) -> None:
    check(name, THOUGHT)


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("conversation", [*PLAIN, *CALLED, *PARALLEL, THOUGHT])
def test_prompts_are_those_of_transformers_with_the_switch_of_reasoning(
    name: str, thinking: bool | None, conversation: Conversation
) -> None:
    renderer, text = RENDERERS[name]
    first = talk(*conversation.messages[:1], tools=conversation.tools, thinking=thinking)

    assert renderer.render(first) == golden(reference(text), first)


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_reasoning_that_the_template_drops_stays_in_an_extension(name: str) -> None:
    """The rest equals the golden one; the answer before it keeps its sampled tokens."""
    renderer, text = RENDERERS[name]
    tokenizer = reference(text)
    asked = talk(user("a"))
    answer = assistant("b", reasoning="hm")
    end = id_of(text, "<|im_end|>")
    answered = talk(*asked.messages, answer)
    known = known_after(tokenizer, answered, golden(tokenizer, asked), end)
    followed = talk(*answered.messages, user("c ☀"))
    rest = renderer.extend(followed, num_known=2, known_ids=known)

    assert "<think>\nhm\n</think>\n\nb<|im_end|>" in text.tokenizer.decode(
        known, skip_special_tokens=False
    )
    assert rest == golden(tokenizer, followed)[-len(rest) :]
    assert text.tokenizer.decode(rest, skip_special_tokens=False) == (
        "\n<|im_start|>user\nc ☀<|im_end|>\n<|im_start|>assistant\n"
    )


WORDS = st.text(alphabet="ab é☀\n{\"'<", max_size=8)


# An answer's own leading space would merge with the line break of its header.
ANSWERS = WORDS.map("a".__add__)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Any turns: questions, answers, and calls with their results."""
    messages = [system(draw(WORDS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(min_value=1, max_value=4))):
        messages.append(user(draw(WORDS)))
        for n in range(draw(st.integers(min_value=0, max_value=2))):
            made = call("stop", '{"now": "é"}', n=n)
            messages += [assistant(draw(ANSWERS), made), result(draw(WORDS), of=made)]
        messages.append(assistant(draw(ANSWERS)))
    return talk(*messages, tools=(STOP,) if draw(st.booleans()) else ())


@settings(max_examples=60)
@given(conversation=conversations())
def test_any_conversation_is_rendered_and_extended_as_transformers_does(
    conversation: Conversation,
) -> None:
    check("chatml without reasoning", conversation)
