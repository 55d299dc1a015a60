"""What holds for every protocol, shown with each of them through the whole application."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from onlinerl.errors import EngineAborted
from onlinerl.rollout_store.schema import Protocol
from onlinerl.serving.config import LimitsConfig
from onlinerl.serving.engine_client.completions_api import failure_of
from onlinerl.serving.protocols.responses.store import MemoryResponseStore
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import KEY, LOG_KEY, OTHER_KEY, USER, Caller, World, ask, make_world

pytestmark = pytest.mark.asyncio

TEXT = "Click the link."
Body = dict[str, Any]


@dataclass(frozen=True)
class Spoken:
    """A protocol as a client of it sees it."""

    name: Protocol
    path: str
    asked: Body
    text_of: Callable[[Any], str]
    """Text of a whole answer."""
    delta_of: Callable[[Any], str]
    """Text that one event of a stream brings."""
    counted: Callable[[Any], int]
    """Sampled tokens of a whole answer, as the client is told."""
    error_of: Callable[[Any], str]
    """Message of an error, whole or as an event; raises when it is no error of this protocol."""


def _of_anthropic(body: Any) -> str:
    assert body["type"] == "error"
    return str(body["error"]["message"])


SPOKEN = [
    Spoken(
        "openai.chat",
        "/v1/chat/completions",
        {"model": "assistant", "messages": USER},
        lambda body: body["choices"][0]["message"]["content"],
        lambda event: "".join(c["delta"].get("content", "") for c in event.get("choices", ())),
        lambda body: body["usage"]["completion_tokens"],
        lambda body: body["error"]["message"],
    ),
    Spoken(
        "openai.completions",
        "/v1/completions",
        {"model": "assistant", "prompt": "Hi", "max_tokens": 100},
        lambda body: body["choices"][0]["text"],
        lambda event: "".join(choice["text"] for choice in event.get("choices", ())),
        lambda body: body["usage"]["completion_tokens"],
        lambda body: body["error"]["message"],
    ),
    Spoken(
        "openai.responses",
        "/v1/responses",
        {"model": "assistant", "input": "Hi"},
        lambda body: body["output"][0]["content"][0]["text"],
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda body: body["usage"]["output_tokens"],
        lambda body: body["message"] if body.get("type") == "error" else body["error"]["message"],
    ),
    Spoken(
        "anthropic.messages",
        "/v1/messages",
        {"model": "assistant", "messages": USER, "max_tokens": 100},
        lambda body: body["content"][0]["text"],
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
        lambda body: body["usage"]["output_tokens"],
        _of_anthropic,
    ),
]
every = pytest.mark.parametrize("spoken", SPOKEN, ids=lambda spoken: spoken.name)
streamed_and_whole = pytest.mark.parametrize("stream", [True, False])


def events(caller: Caller) -> list[Any]:
    lines = caller.received.split(b"\n")
    data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    return [json.loads(item) for item in data if item != b"[DONE]"]


def shown(spoken: Spoken, caller: Caller) -> str:
    return "".join(map(spoken.delta_of, events(caller)))


async def started(renderer: TemplateRenderer, **options: Any) -> World:
    store = MemoryResponseStore(max_rows=100, retain_s=3600.0)
    world = make_world(renderer, responses=store, **options)
    for replica in world.gateway.pool.replicas:
        await world.gateway.pool.look(replica)
    return world


async def until_sampled(world: World, num_requests: int = 1) -> None:
    async with asyncio.timeout(60):
        while len(world.engine.requests) < num_requests:
            await asyncio.sleep(0.001)


@pytest.fixture
async def world(renderer: TemplateRenderer) -> World:
    return await started(renderer)


@every
async def test_every_token_is_sent_before_the_next_is_sampled_and_logged_exactly(
    world: World, spoken: Spoken
) -> None:
    ids = world.answers[0]
    world.engine.hold_at = 1
    caller = Caller(world.app, path=spoken.path, json_body={**spoken.asked, "stream": True})
    said: list[str] = []
    for number in range(1, len(ids)):
        text = world.renderer.decode(ids[:number])
        async with asyncio.timeout(60):
            while shown(spoken, caller) != text:
                await asyncio.sleep(0.001)
        said.append(text)
        world.engine.hold_at = number + 1
    await caller.done()

    assert said[-1] == shown(spoken, caller) == TEXT
    (event,) = world.interactions
    (choice,) = event.choices
    assert (event.protocol, event.streamed, event.trainable) == (spoken.name, True, True)
    assert choice.completion_token_ids == ids
    assert choice.logprobs == [-0.5] * len(ids)


@every
async def test_the_client_is_told_as_many_tokens_as_are_logged(
    world: World, spoken: Spoken
) -> None:
    caller = await ask(world, spoken.asked, path=spoken.path)

    assert spoken.text_of(caller.json) == TEXT
    (event,) = world.interactions
    assert spoken.counted(caller.json) == len(event.choices[0].completion_token_ids)
    assert event.prompt_token_ids == list(world.engine.requests[0].token_ids)


@every
async def test_a_whole_answer_names_what_sampled_it_also_right_after_a_swap(
    world: World, spoken: Spoken
) -> None:
    known = world.gateway.pool.versions()
    world.engine.version = "assistant/7"
    caller = await ask(world, spoken.asked, path=spoken.path)

    assert known != ["assistant/7"]
    assert caller.headers["x-onlinerl-policy-version"] == "assistant/7"
    (event,) = world.interactions
    assert [span.version for span in event.choices[0].version_spans] == ["assistant/7"]


@every
@streamed_and_whole
@pytest.mark.parametrize("num_served", [0, 2])
async def test_leaving_stops_the_engine_frees_the_place_and_logs_what_was_sampled(
    renderer: TemplateRenderer, spoken: Spoken, stream: bool, num_served: int
) -> None:
    world = await started(renderer, limits=LimitsConfig(max_in_flight=1))
    world.engine.hold_at = num_served
    caller = Caller(world.app, path=spoken.path, json_body={**spoken.asked, "stream": stream})
    await until_sampled(world)
    if stream and num_served:
        async with asyncio.timeout(60):
            while not shown(spoken, caller):
                await asyncio.sleep(0.001)
    caller.leave()
    await caller.done()
    await world.ended()

    (asked,) = world.engine.requests
    assert world.engine.aborted == world.engine.closed == [asked.request_id]
    (event,) = world.interactions
    (choice,) = event.choices
    assert choice.finish_reason == "client_disconnect"
    assert choice.completion_token_ids == world.answers[0][: len(choice.completion_token_ids)]
    assert len(choice.logprobs) == len(choice.completion_token_ids) <= num_served
    assert event.trainable == bool(choice.completion_token_ids)
    world.engine.hold_at = None
    assert (await ask(world, spoken.asked, path=spoken.path)).status == 200


@every
@streamed_and_whole
@pytest.mark.parametrize("status", [400, 429, 500, 502, 503, 504])
async def test_an_error_before_the_first_byte_keeps_its_status_in_its_envelope(
    world: World, spoken: Spoken, stream: bool, status: int
) -> None:
    world.engine.failure = failure_of(status, "the engine says no")
    caller = await ask(world, {**spoken.asked, "stream": stream}, path=spoken.path)

    assert caller.status == status
    assert spoken.error_of(caller.json) == "the engine says no"
    assert ("retry-after" in caller.headers) == (status in (429, 503))
    assert world.interactions == []


@every
async def test_an_error_after_the_first_byte_is_the_last_event_and_the_row_says_so(
    world: World, spoken: Spoken
) -> None:
    world.engine.hold_at = 2
    caller = Caller(world.app, path=spoken.path, json_body={**spoken.asked, "stream": True})
    async with asyncio.timeout(60):
        while not shown(spoken, caller):
            await asyncio.sleep(0.001)
    world.engine.failure = EngineAborted("the engine died")
    await caller.done()
    await world.ended()

    assert (caller.status, caller.complete) == (200, True)
    # The responses protocol ends every stream with the response itself.
    told = events(caller)[-2 if spoken.name == "openai.responses" else -1]
    assert spoken.error_of(told) == "the engine died"
    assert b"[DONE]" not in caller.received
    (event,) = world.interactions
    assert (event.choices[0].finish_reason, event.trainable) == ("error", False)
    assert event.choices[0].completion_token_ids == world.answers[0][:2]


@every
@pytest.mark.parametrize("name", ["engine", "base_url", "surprise", "guided_json", "cache_salt"])
async def test_what_is_not_known_is_refused_by_name(
    world: World, spoken: Spoken, name: str
) -> None:
    asked = {**spoken.asked, name: "http://169.254.169.254/"}
    caller = await ask(world, asked, path=spoken.path)

    assert caller.status == 400
    assert name in spoken.error_of(caller.json)
    assert world.engine.requests == []


@every
async def test_without_a_key_nothing_is_served(world: World, spoken: Spoken) -> None:
    for key in (None, "", "areal-admin-key", "x" * 5000):
        caller = await ask(world, spoken.asked, path=spoken.path, key=key)

        assert caller.status == 401
        assert "API key" in spoken.error_of(caller.json)


@every
async def test_tenants_share_neither_session_nor_cache(world: World, spoken: Spoken) -> None:
    session = {"x-onlinerl-session-id": "the-same"}
    for key in (KEY, OTHER_KEY, LOG_KEY):
        caller = await ask(world, spoken.asked, path=spoken.path, key=key, headers=session)
        assert caller.status == 200

    acme, globex, acme_log = (request.cache_salt for request in world.engine.requests)
    assert acme == acme_log != globex
    assert [event.tenant for event in world.interactions] == ["acme", "globex", "acme"]
    assert all(event.parent_id is None for event in world.interactions)


@every
@streamed_and_whole
async def test_without_consent_nothing_is_kept(world: World, spoken: Spoken, stream: bool) -> None:
    asked = {**spoken.asked, "stream": stream}
    refused_consent = {"x-onlinerl-consent": "none"}
    caller = await ask(world, asked, path=spoken.path, headers=refused_consent)

    assert caller.status == 200
    assert world.sink.records == []
    assert world.gateway._prompts._conversations.num_tokens == 0
