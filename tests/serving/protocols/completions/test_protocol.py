from typing import Any

import pytest

from onlinerl.errors import EngineAborted, RequestRefused
from onlinerl.serving.config import GatewayConfig, SamplingDefaults
from onlinerl.serving.interaction.engine import TopLogprob
from onlinerl.serving.interaction.pieces import TokenLogprob
from onlinerl.serving.interaction.request import RawPrompt, Request
from onlinerl.serving.protocols.completions.output import LegacyLogprobs
from onlinerl.serving.protocols.completions.protocol import read_request
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import Caller, World, ask, make_world, speak

PATH = "/v1/completions"


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "assistant", "prompt": "Once upon", **changes}


def parse(**changes: Any) -> Request:
    return read_request(body(**changes), config=GatewayConfig())


@pytest.fixture
async def world(renderer: TemplateRenderer) -> World:
    world = make_world(renderer, speak(renderer, " a time"))
    await world.gateway.start()
    return world


async def complete(world: World, **changes: Any) -> Caller:
    return await ask(world, body(**changes), path=PATH)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**changes)

    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**changes)

    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("a", RawPrompt(text="a")),
        (["a"], RawPrompt(text="a")),
        ([1, 2], RawPrompt(token_ids=(1, 2))),
        ([[1, 2]], RawPrompt(token_ids=(1, 2))),
    ],
)
def test_one_prompt_is_text_or_token_ids(given: object, prompt: RawPrompt) -> None:
    assert parse(prompt=given).prompt == prompt


def test_values_without_effect_are_accepted() -> None:
    nothing = parse(echo=False, suffix=None, best_of=1, frequency_penalty=0, logit_bias={}, n=1)

    assert nothing == parse()


def test_sixteen_tokens_are_sampled_by_default() -> None:
    assert parse().sampling.max_tokens == 16
    assert parse(max_tokens=3).sampling.max_tokens == 3
    told = GatewayConfig(sampling=SamplingDefaults(max_tokens=7))
    assert read_request(body(), config=told).sampling.max_tokens == 7


def test_token_offsets_count_characters_over_all_pieces() -> None:
    def token(text: str, *top: TokenLogprob) -> TokenLogprob:
        return TokenLogprob(text=text, token_bytes=text.encode(), logprob=-0.5, top=top)

    written = LegacyLogprobs()
    first = written.of([token("ab", token("x")), token("c")])
    second = written.of([token("é")])

    assert first == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"x": -0.5}, None],
        "text_offset": [0, 2],
    }
    assert second["text_offset"] == [3]


@pytest.mark.asyncio
async def test_the_prompt_goes_to_the_engine_as_it_is_and_the_row_is_trainable(
    world: World,
) -> None:
    caller = await complete(world)

    (event,) = world.interactions
    ids = world.renderer.tokenize("Once upon")
    assert list(world.engine.requests[0].token_ids) == event.prompt_token_ids == ids
    (choice,) = caller.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" a time", "stop")
    assert caller.json["object"] == "text_completion"
    assert caller.json["usage"]["prompt_tokens"] == len(ids)
    assert (event.protocol, event.trainable) == ("openai.completions", True)


@pytest.mark.asyncio
async def test_token_ids_are_not_decoded_and_encoded_again(world: World) -> None:
    await complete(world, prompt=[198, 198, 5])

    assert world.interactions[0].prompt_token_ids == [198, 198, 5]


@pytest.mark.asyncio
async def test_an_empty_prompt_is_refused(world: World) -> None:
    caller = await complete(world, prompt="")

    assert (caller.status, caller.json["error"]["param"]) == (400, "prompt")


@pytest.mark.asyncio
async def test_a_stream_is_the_same_text_and_ends_with_the_counts(world: World) -> None:
    whole = await complete(world, logprobs=0)
    streamed = await complete(
        world, stream=True, logprobs=0, stream_options={"include_usage": True}
    )

    *chunks, usage, done = streamed.events
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole.json["usage"])
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == " a time"
    assert choices[-1]["finish_reason"] == "stop"
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for logprobs in told for token in logprobs["tokens"]]
    assert tokens == whole.json["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == usage["usage"]["completion_tokens"]


@pytest.mark.asyncio
async def test_alternatives_are_shown(world: World) -> None:
    world.engine.top = [TopLogprob(token_id=198, logprob=-1.5)]
    caller = await complete(world, logprobs=1)

    assert caller.json["choices"][0]["logprobs"]["top_logprobs"][0] == {"\n": -1.5}


@pytest.mark.asyncio
async def test_several_choices_count_their_own_offsets(renderer: TemplateRenderer) -> None:
    world = make_world(renderer, speak(renderer, " one"), speak(renderer, " two"))
    await world.gateway.start()
    caller = await complete(world, n=2, stream=True, logprobs=0)

    first = {
        choice["index"]: choice["logprobs"]["text_offset"][0]
        for event in reversed(caller.events[:-1])
        for choice in event["choices"]
        if choice["text"]
    }
    assert first == {0: 0, 1: 0}


@pytest.mark.asyncio
async def test_raw_prompts_are_never_taken_for_a_conversation(world: World) -> None:
    await complete(world, user="ada")
    await complete(world, user="ada")

    one, two = world.interactions
    assert (one.parent_id, two.parent_id) == (None, None)
    assert one.session_id != two.session_id


@pytest.mark.asyncio
async def test_an_error_after_the_first_byte_ends_the_stream_with_an_event(world: World) -> None:
    world.engine.hold_at = 1
    caller = Caller(world.app, json_body=body(stream=True), path=PATH)
    await caller.until(b" a")
    world.engine.failure = EngineAborted("died")
    await caller.done()

    assert caller.status == 200
    assert caller.events[-1]["error"]["message"] == "died"
