"""Forced calls, sampled by a real vLLM engine from a model that knows nothing."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from onlinerl.serving.interaction.request import Conversation, Tool, ToolChoice
from onlinerl.serving.parsing.output_parser import AnswerParser
from onlinerl.serving.rendering.loading import load_renderer
from onlinerl.serving.rendering.protocol import Renderer
from tests.integration.engines import Engine
from tests.serving.talking import talk, user

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STOP = Tool(
    name="stop",
    parameters={
        "type": "object",
        "properties": {"now": {"type": "boolean"}, "why": {"enum": ["rain", "ünï"]}},
        "required": ["now", "why"],
        "additionalProperties": False,
    },
)
GO = Tool(
    name="go",
    parameters={
        "type": "object",
        "properties": {"to": {"type": "string", "maxLength": 4}},
        "required": ["to"],
    },
)
ASKED = talk(user("Shall we go?"), tools=(STOP, GO))


@pytest.fixture(scope="module")
def chatml(tiny_model_dir: Path) -> Renderer:
    return load_renderer("chatml", str(tiny_model_dir))


def sample(engine: Engine, renderer: Renderer, choice: ToolChoice, *, seed: int) -> dict[str, Any]:
    """What the engine sampled under the grammar of `choice`."""
    body = {
        "model": "assistant",
        "token_ids": renderer.render(ASKED),
        "sampling_params": {
            "max_tokens": 400,
            "temperature": 1.0,
            "seed": seed,
            "stop_token_ids": sorted(renderer.end_ids),
            "structured_outputs": renderer.tool_grammar(ASKED.tools, choice),
            "detokenize": False,
        },
    }
    request = urllib.request.Request(
        f"{engine.url}/inference/v1/generate",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)["choices"][0]
    return answer


def read(renderer: Renderer, asked: Conversation, ids: list[int]) -> AnswerParser:
    parser = renderer.parser(asked, choice_index=0, stops=(), parse_tools=True)
    for token_id in ids:
        parser.push(token_id)
    parser.end()
    assert isinstance(parser, AnswerParser)
    return parser


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_named_call_is_sampled_whole_and_ends_the_answer(
    shared_engine: Engine, chatml: Renderer, seed: int
) -> None:
    choice = ToolChoice(mode="required", name="stop", parallel=False)
    answer = sample(shared_engine, chatml, choice, seed=seed)
    parser = read(chatml, ASKED, answer["token_ids"])

    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"][-1] in chatml.end_ids
    assert parser.content == ""
    (made,) = parser.tool_calls
    arguments = json.loads(made.arguments)
    assert made.name == "stop"
    assert isinstance(arguments["now"], bool)
    assert arguments["why"] in ("rain", "ünï")


def test_required_calls_are_of_the_tools_and_obey_their_schemas(
    shared_engine: Engine, chatml: Renderer
) -> None:
    answer = sample(shared_engine, chatml, ToolChoice(mode="required"), seed=7)
    parser = read(chatml, ASKED, answer["token_ids"])

    assert parser.tool_calls
    assert {made.name for made in parser.tool_calls} <= {"stop", "go"}
    # A list of calls may be cut by its length; then the last one is text.
    assert answer["finish_reason"] == "length" or parser.content == ""
