from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.gateway.constraint import engine_parameters, grammar_of, resolve_request
from onlinerl.serving.interaction.request import (
    Conversation,
    JsonFormat,
    Message,
    RawPrompt,
    Request,
    Tool,
    ToolChoice,
)
from onlinerl.serving.rendering.protocol import Renderer

WEATHER = Tool(name="weather")
SCHEMA = {"type": "object"}


class Grammars:
    """A renderer that only knows how calls are forced."""

    def tool_grammar(
        self, tools: Sequence[Tool], choice: ToolChoice
    ) -> Mapping[str, object] | None:
        return {"grammar": [tool.name for tool in tools]} if choice.mode == "required" else None


def request(**changes: Any) -> Request:
    tools = changes.pop("tools", ())
    thinking = changes.pop("thinking", None)
    prompt = Conversation(
        messages=(Message(role="user", content="Hi"),), tools=tools, thinking=thinking
    )
    values: dict[str, Any] = {
        "protocol": "openai.chat",
        "model": "assistant",
        "prompt": prompt,
        "sampling": Sampling(max_tokens=5),
    }
    return Request(**(values | changes))


def grammar(**changes: Any) -> Mapping[str, object] | None:
    return grammar_of(resolve_request(request(**changes)), cast(Renderer, Grammars()))


def parameters(sampling: Sampling, **changes: Any) -> dict[str, object]:
    values: dict[str, Any] = {"choice_index": 0, "end_ids": frozenset({2}), "grammar": None}
    return engine_parameters(sampling, **(values | changes))


def test_nothing_is_enforced_by_itself() -> None:
    assert grammar() is None
    assert grammar(tools=(WEATHER,)) is None


def test_formats_become_structured_output() -> None:
    assert grammar(format=JsonFormat()) == {"json_object": True}
    assert grammar(format=JsonFormat(schema=SCHEMA)) == {"json": SCHEMA}


def test_calls_that_must_be_made_are_the_renderer_s_to_force() -> None:
    required = ToolChoice(mode="required")

    assert grammar(tools=(WEATHER,), tool_choice=required) == {"grammar": ["weather"]}


def test_a_format_and_tools_are_refused_unless_none_may_be_called() -> None:
    with pytest.raises(RequestRefused, match="no room for a call") as caught:
        grammar(tools=(WEATHER,), format=JsonFormat())

    assert caught.value.param == "response_format"
    none = ToolChoice(mode="none")
    assert grammar(tools=(WEATHER,), tool_choice=none, format=JsonFormat()) is not None


def test_tools_that_may_not_be_called_are_not_told() -> None:
    none = resolve_request(request(tools=(WEATHER,), tool_choice=ToolChoice(mode="none")))
    auto = resolve_request(request(tools=(WEATHER,)))

    assert isinstance(none.prompt, Conversation)
    assert isinstance(auto.prompt, Conversation)
    assert (none.prompt.tools, auto.prompt.tools) == ((), (WEATHER,))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"format": JsonFormat()}, "response_format"),
        ({"tools": (WEATHER,), "tool_choice": ToolChoice(mode="required")}, "tool_choice"),
    ],
)
def test_nobody_thinks_before_what_is_forced(changes: dict[str, Any], param: str) -> None:
    forced = resolve_request(request(**changes))

    assert isinstance(forced.prompt, Conversation)
    assert forced.prompt.thinking is False
    with pytest.raises(RequestRefused, match="reasoning") as caught:
        resolve_request(request(thinking=True, **changes))
    assert caught.value.param == param


def test_calls_that_may_be_made_leave_thinking_as_it_was() -> None:
    free = request(tools=(WEATHER,), thinking=True)

    assert resolve_request(free) is free


def test_a_raw_prompt_stays_as_it_is() -> None:
    raw = request(prompt=RawPrompt(text="Hi"))

    assert resolve_request(raw) is raw
    assert grammar_of(raw, cast(Renderer, Grammars())) is None


def test_the_engine_is_told_what_was_asked_for_and_no_more() -> None:
    assert parameters(Sampling(temperature=0.7, max_tokens=5)) == {
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "stop_token_ids": [2],
        "detokenize": False,
    }


def test_the_engine_decodes_only_to_find_stop_strings() -> None:
    told = parameters(Sampling(stop=["END"]))

    assert (told["detokenize"], told["stop"]) == (True, ["END"])


def test_choices_have_seeds_of_their_own() -> None:
    assert [parameters(Sampling(seed=7), choice_index=n)["seed"] for n in (0, 1)] == [7, 8]


def test_penalties_biases_and_grammars_are_passed_on() -> None:
    shaped = Sampling.model_validate({"frequency_penalty": 0.5, "logit_bias": {"1": 2.0}})
    told = parameters(shaped, grammar={"json": SCHEMA})

    assert told["frequency_penalty"] == 0.5
    assert told["logit_bias"] == {"1": 2.0}
    assert told["structured_outputs"] == {"json": SCHEMA}
    assert "presence_penalty" not in told
