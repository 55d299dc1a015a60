"""What every protocol gets from its route, shown with a protocol of a few lines."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from onlinerl.errors import EngineAborted, EngineFailed, EngineRefused, RequestRefused
from onlinerl.rollout_store.schema import Sampling
from onlinerl.serving.config import KeyLimits, LimitsConfig
from onlinerl.serving.encoding.json import Body
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.pieces import Finish, Outcome, Piece, TextDelta
from onlinerl.serving.interaction.request import Conversation, Message, Request
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from onlinerl.serving.wire.protocol import IncomingRequest
from tests.serving.world import KEY, Caller, World, ask, body, make_world, speak

pytestmark = pytest.mark.asyncio

PATH = "/plain"


class PlainWriter:
    def open(self) -> bytes:
        return b"<"

    def write(self, piece: Piece) -> bytes:
        if isinstance(piece, TextDelta):
            return piece.text.encode()
        assert isinstance(piece, Finish)
        return b"|"

    def close(self, outcomes: Sequence[Outcome]) -> bytes:
        return b"%d>" % sum(outcome.num_tokens for outcome in outcomes)

    def fail(self, failure: EngineFailed) -> bytes:
        return f"!{failure.message}".encode()


class PlainWire:
    """A body is one question; `kept` are the answers that ended."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.fault: Exception | None = None

    async def read(self, incoming: IncomingRequest) -> Request:
        if not isinstance(incoming.body, dict) or "q" not in incoming.body:
            raise RequestRefused("ask something", 400, "q")
        return Request(
            protocol="openai.responses",
            model="assistant",
            prompt=Conversation(messages=(Message(role="user", content=incoming.body["q"]),)),
            sampling=Sampling(),
            stream=incoming.body.get("stream", False),
            session_id=incoming.body.get("session"),
        )

    def whole(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Body:
        return {"a": outcomes[0].content}

    def writer(self, exchange: Exchange) -> PlainWriter:
        return PlainWriter()

    async def keep(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        if self.fault is not None:
            raise self.fault
        self.kept += [outcome.content for outcome in outcomes]

    def error(self, error: RequestRefused | EngineFailed) -> Body:
        return {"plain_error": error.message}


@pytest.fixture
def wire() -> PlainWire:
    return PlainWire()


@pytest.fixture
async def world(renderer: TemplateRenderer, wire: PlainWire) -> World:
    world = make_world(renderer, speak(renderer, "Click the link."), wires={PATH: wire})
    await world.gateway.start()
    return world


async def plain(world: World, **changes: Any) -> Caller:
    return await ask(world, {"q": "Hi", **changes}, path=PATH)


async def test_a_protocol_is_its_wire_and_no_more(world: World, wire: PlainWire) -> None:
    whole = await plain(world)
    streamed = await plain(world, stream=True)

    assert whole.json == {"a": "Click the link."}
    assert streamed.received == b"<Click the link.|5>"
    assert [event.protocol for event in world.interactions] == ["openai.responses"] * 2
    assert wire.kept == ["Click the link."] * 2


async def test_every_chunk_of_the_engine_is_one_write(world: World) -> None:
    world.engine.tokens_per_chunk = 100
    sent = 0
    caller = Caller(world.app, json_body={"q": "Hi", "stream": True}, path=PATH)
    receive = caller._send

    async def counting(message: Any) -> None:
        nonlocal sent
        sent += message["type"] == "http.response.body"
        await receive(message)

    caller._send = counting  # type: ignore[method-assign]
    await caller.done()

    assert caller.received == b"<Click the link.|5>"
    assert sent == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_byte_come_in_its_envelope(
    world: World, stream: bool
) -> None:
    refused = await ask(world, {}, path=PATH)
    unknown = await ask(world, {"q": "Hi"}, path=PATH, key="wrong")
    world.engine.failure = EngineRefused("no", 418)
    failed = await plain(world, stream=stream)

    assert (refused.status, refused.json) == (400, {"plain_error": "ask something"})
    assert (unknown.status, list(unknown.json)) == (401, ["plain_error"])
    assert (failed.status, failed.json) == (418, {"plain_error": "no"})


async def test_an_error_after_the_first_byte_is_its_event(world: World, wire: PlainWire) -> None:
    world.engine.hold_at = 2
    caller = Caller(world.app, json_body={"q": "Hi", "stream": True}, path=PATH)
    await caller.until(b"Click")
    world.engine.failure = EngineAborted("died")
    await caller.done()

    assert caller.received.endswith(b"!died")
    assert wire.kept == []


async def test_an_answer_that_cannot_be_kept_is_an_error_and_is_logged(
    world: World, wire: PlainWire
) -> None:
    wire.fault = OSError("disk full")
    whole = await plain(world)
    streamed = await plain(world, stream=True)

    failed = {"plain_error": "the gateway failed to keep the answer"}
    assert (whole.status, whole.json) == (500, failed)
    assert streamed.received.endswith(b"!the gateway failed to keep the answer")
    assert len(world.interactions) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_stops_the_engine_whatever_the_protocol(
    world: World, wire: PlainWire, stream: bool
) -> None:
    world.engine.hold_at = 2
    caller = Caller(world.app, json_body={"q": "Hi", "stream": stream}, path=PATH)
    async with asyncio.timeout(60):
        while not world.engine.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
    caller.leave()
    await caller.done()
    await world.ended()

    (event,) = world.interactions
    assert event.choices[0].finish_reason == "client_disconnect"
    assert world.engine.aborted == [f"{event.interaction_id}-0"]
    assert wire.kept == []


async def test_a_key_may_come_in_the_header_of_anthropic_s_clients(world: World) -> None:
    caller = await ask(world, {"q": "Hi"}, path=PATH, key=None, headers={"x-api-key": KEY})

    assert caller.status == 200


async def test_the_session_of_the_body_gives_way_to_that_of_the_header(world: World) -> None:
    named = {"x-onlinerl-session-id": "header"}
    await ask(world, {"q": "Hi", "session": "body"}, path=PATH, headers=named)
    caller = await plain(world, session="body")

    assert [event.session_id for event in world.interactions] == ["header", "body"]
    assert caller.headers["x-onlinerl-session-id"] == "body"


async def test_the_request_id_is_that_of_the_row(world: World) -> None:
    caller = await plain(world)

    assert caller.headers["x-request-id"] == world.interactions[0].interaction_id


# Asked again


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_idempotency_key_is_one_row_and_one_answer(
    world: World, stream: bool
) -> None:
    key = {"idempotency-key": "k1"}
    one = await ask(world, {"q": "Hi", "stream": stream}, path=PATH, headers=key)
    two = await ask(world, {"q": "Hi", "stream": stream}, path=PATH, headers=key)

    assert (one.received, one.headers) == (two.received, two.headers)
    assert len(world.interactions) == 1


async def test_equal_bodies_without_a_key_are_two_samples(world: World) -> None:
    one, two = await plain(world), await plain(world)

    assert one.received == two.received
    assert len(world.interactions) == 2


# Places


async def test_every_way_out_gives_the_place_back(renderer: TemplateRenderer) -> None:
    wire = PlainWire()
    limits = LimitsConfig(max_in_flight=1)
    world = make_world(renderer, wires={PATH: wire}, limits=limits)
    await world.gateway.start()
    key = {"idempotency-key": "k1"}

    statuses = []
    for _ in range(2):
        refused = await ask(world, {}, path=PATH)
        unknown = await ask(world, body(model="other"))
        answered = await ask(world, {"q": "Hi"}, path=PATH, headers=key)
        world.engine.failure = EngineRefused("no", 418)
        failed = await plain(world)
        world.engine.failure = None
        wire.fault = OSError("disk full")
        unkept = await plain(world)
        wire.fault = None
        statuses += [r.status for r in (refused, unknown, answered, failed, unkept)]

    assert statuses == [400, 404, 200, 418, 500] * 2


async def test_what_an_answer_really_took_is_settled_at_its_end(
    renderer: TemplateRenderer,
) -> None:
    per_key = KeyLimits(tokens_per_minute=1000)
    world = make_world(renderer, limits=LimitsConfig(per_key=per_key))
    await world.gateway.start()
    first = await ask(world, body(max_tokens=500))
    second = await ask(world, body(max_tokens=500))

    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert (first.status, second.status) == (200, 200)
    usage = first.json["usage"]["total_tokens"]
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    # The second has reserved its 500 and a guess at its prompt.
    assert 1000 - usage - 500 - 30 <= left <= 1000 - usage - 500 + 5


# Answers that an engine aborts


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_an_update_aborts_goes_on_where_it_was(
    world: World, at: int, stream: bool
) -> None:
    said = world.answers[0]

    def script(request: Any) -> Sequence[int]:
        known = len(request.token_ids) - len(world.engine.requests[0].token_ids)
        return said[known:]

    world.engine._script = script
    world.engine.stops_itself_at = at
    caller = await plain(world, stream=stream)

    assert b"Click the link." in caller.received
    (event,) = world.interactions
    (choice,) = event.choices
    assert choice.completion_token_ids == said
    assert len(choice.logprobs) == len(said)
    assert (choice.finish_reason, event.trainable) == ("stop", True)
    first, second = world.engine.requests
    assert list(second.token_ids) == [*first.token_ids, *said[:at]]


async def test_an_abort_that_cannot_be_continued_is_an_error(world: World) -> None:
    world.engine.stops_itself_at = 2
    caller = await ask(world, body(frequency_penalty=1))

    assert caller.status == 502
    assert "'abort'" in caller.json["error"]["message"]
    (event,) = world.interactions
    assert event.choices[0].finish_reason == "abort"
    assert len(event.choices[0].completion_token_ids) == 2
    assert not event.trainable
