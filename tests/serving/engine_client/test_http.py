import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from onlinerl.errors import (
    EngineAborted,
    EngineDisconnected,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
)
from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.serving.config import TimeoutsConfig
from onlinerl.serving.engine_client.http import HttpEngine, engine_session
from onlinerl.serving.interaction.engine import Chunk, Generate, TopLogprob
from tests.brokers import free_port

pytestmark = pytest.mark.asyncio

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeVllm:
    """A server with the routes of vLLM that the gateway uses."""

    def __init__(self) -> None:
        self.generate: Handler = self.answer
        self.healthy = True
        self.slow_s = 0.0
        self.weight_info = b'{"weight_version": "assistant/3"}'
        self.models = [{"id": "m"}, {"id": "m@12"}, {"id": "m@13"}]
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.aborted: list[str] = []
        self.num_closed = 0

    async def on_generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        return await self.generate(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return await stream(request, piece([5, 6]), piece([2], finish="stop"))

    async def on_abort(self, request: web.Request) -> web.Response:
        self.aborted += (await request.json())["request_ids"]
        return web.Response()

    async def on_health(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.slow_s)
        return web.Response(status=200 if self.healthy else 503)

    async def on_weight_info(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.Response(body=self.weight_info)

    async def on_models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.models})


def piece(ids: list[int], *, finish: str | None = None) -> bytes:
    content = [{"token_id": n, "logprob": -n / 10, "rank": 9, "top_logprobs": _top(n)} for n in ids]
    spans = [{"version": "assistant/3", "start": 0, "end": 3}] if finish else None
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "weight_versions": spans,
    }
    return b"data: " + json.dumps({"request_id": "r", "choices": [choice]}).encode() + b"\n\n"


def _top(sampled: int) -> list[dict[str, float]]:
    """As vLLM: the sampled token first, then the others by rank."""
    return [
        {"token_id": sampled, "logprob": -sampled / 10, "rank": 9},
        {"token_id": 40, "logprob": -0.1, "rank": 1},
        {"token_id": 41, "logprob": -0.2, "rank": 2},
    ]


async def stream(request: web.Request, *pieces: bytes, done: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for data in (*pieces, b"data: [DONE]\n\n") if done else pieces:
        await response.write(data)
    return response


@pytest.fixture
async def vllm() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
async def engine(vllm: FakeVllm) -> AsyncIterator[HttpEngine]:
    app = web.Application()
    app.router.add_post("/inference/v1/generate", vllm.on_generate)
    app.router.add_post("/inference/v1/abort_requests", vllm.on_abort)
    app.router.add_get("/health", vllm.on_health)
    app.router.add_get("/weight_info", vllm.on_weight_info)
    app.router.add_get("/v1/models", vllm.on_models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    timeouts = TimeoutsConfig(connect_s=1, idle_s=0.3)
    async with engine_session(secret="the shared secret") as http:
        yield HttpEngine(f"http://127.0.0.1:{port}/", model="m", http=http, timeouts=timeouts)
    await runner.cleanup()


def request() -> Generate:
    return Generate(request_id="r1", token_ids=[1, 2], sampling={"n": 3}, cache_salt="a:b")


async def chunks(engine: HttpEngine, asked: Generate | None = None) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked or request())]


async def test_chunks_hold_ids_logprobs_and_spans(engine: HttpEngine) -> None:
    first, last = await chunks(engine)

    assert (first.token_ids, first.logprobs, first.finish_reason) == ([5, 6], [-0.5, -0.6], None)
    assert (last.token_ids, last.finish_reason) == ([2], "stop")
    assert last.version_spans == [VersionSpan(version="assistant/3", start=0, end=3)]


async def test_a_request_asks_for_one_completion_with_logprobs(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    await chunks(engine)

    (sent,) = vllm.bodies
    assert sent["sampling_params"] == {"n": 1, "logprobs": 0}
    assert (sent["request_id"], sent["cache_salt"], sent["stream"]) == ("r1", "a:b", True)
    assert (sent["model"], sent["token_ids"]) == ("m", [1, 2])
    assert sent["stream_options"] == {"include_usage": True}


async def test_alternatives_are_asked_for_beside_the_sampled_token(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    """vLLM counts the sampled token among them, and cuts the last one off where it is none."""
    (first, *_) = await chunks(engine, replace(request(), top_logprobs=2))

    assert vllm.bodies[0]["sampling_params"]["logprobs"] == 3
    assert (
        first.top_logprobs
        == [[TopLogprob(token_id=40, logprob=-0.1), TopLogprob(token_id=41, logprob=-0.2)]] * 2
    )


async def test_an_adapter_is_asked_as_a_model(engine: HttpEngine, vllm: FakeVllm) -> None:
    await chunks(engine, replace(request(), adapter="m@12"))

    assert vllm.bodies[0]["model"] == "m@12"
    assert await engine.adapters() == {"m@12", "m@13"}


async def test_the_secret_and_the_headers_of_a_trace_are_sent(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    await chunks(engine, replace(request(), headers={"traceparent": "00-1-2-01"}))
    await engine.weight_version()

    assert [sent["authorization"] for sent in vllm.headers] == ["Bearer the shared secret"] * 2
    assert vllm.headers[0]["traceparent"] == "00-1-2-01"


async def test_the_last_chunk_tells_what_the_prefix_cache_held(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    tail = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    vllm.generate = lambda incoming: stream(
        incoming, piece([5, 6]), piece([2], finish="stop"), tail
    )
    first, last = await chunks(engine)

    assert (first.num_cached_tokens, first.finish_reason) == (None, None)
    assert (last.num_cached_tokens, last.finish_reason) == (7, "stop")


async def test_a_refusal_keeps_status_and_message(engine: HttpEngine, vllm: FakeVllm) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)

    vllm.generate = refuse
    with pytest.raises(EngineRefused, match="too long") as caught:
        await chunks(engine)
    assert caught.value.status == 400


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_an_engine_that_does_not_know_the_gateway_is_no_fault_of_the_caller(
    engine: HttpEngine, vllm: FakeVllm, status: int
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status)

    vllm.generate = refuse
    with pytest.raises(EngineProtocolError, match=str(status)) as caught:
        await chunks(engine)
    assert caught.value.status == 502


async def test_an_error_event_breaks_the_stream(engine: HttpEngine, vllm: FakeVllm) -> None:
    async def fail(incoming: web.Request) -> web.StreamResponse:
        error = b'data: {"error": {"message": "boom", "code": 500}}\n\n'
        return await stream(incoming, piece([5]), error)

    vllm.generate = fail
    with pytest.raises(EngineRefused, match="boom") as caught:
        await chunks(engine)
    assert caught.value.status == 500


async def test_a_stream_without_a_finish_reason_was_broken_off(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    vllm.generate = lambda incoming: stream(incoming, piece([5]), done=False)
    with pytest.raises(EngineAborted, match="broke off"):
        await chunks(engine)


async def test_a_silent_engine_times_out(engine: HttpEngine, vllm: FakeVllm) -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    vllm.generate = hang
    with pytest.raises(EngineTimeout) as caught:
        await chunks(engine)
    assert caught.value.status == 504


async def test_a_connection_closed_before_the_answer_is_tried_once_more(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    async def hang_up_once(incoming: web.Request) -> web.StreamResponse:
        if len(vllm.bodies) == 1:
            assert incoming.transport is not None
            incoming.transport.close()
        return await vllm.answer(incoming)

    vllm.generate = hang_up_once
    assert len(await chunks(engine)) == 2
    assert len(vllm.bodies) == 2


async def test_a_connection_closed_in_the_answer_is_not_tried_again(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    async def hang_up(incoming: web.Request) -> web.StreamResponse:
        response = await stream(incoming, piece([5]), done=False)
        assert incoming.transport is not None
        incoming.transport.close()
        return response

    vllm.generate = hang_up
    with pytest.raises(EngineDisconnected):
        await chunks(engine)
    assert len(vllm.bodies) == 1


async def test_a_connection_that_closes_twice_is_given_up(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    async def hang_up(incoming: web.Request) -> web.StreamResponse:
        assert incoming.transport is not None
        incoming.transport.close()
        return web.Response()

    vllm.generate = hang_up
    with pytest.raises(EngineDisconnected) as caught:
        await chunks(engine)
    assert caught.value.status == 503
    assert len(vllm.bodies) == 2


async def test_an_engine_that_is_not_there_is_unreachable() -> None:
    async with engine_session() as http:
        timeouts = TimeoutsConfig(connect_s=1)
        address = f"http://127.0.0.1:{free_port()}"
        absent = HttpEngine(address, model="m", http=http, timeouts=timeouts)
        with pytest.raises(EngineUnreachable) as caught:
            await chunks(absent)
        assert caught.value.status == 503
        with pytest.raises(EngineUnreachable):
            await absent.weight_version()


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_engine_that_takes_no_connection_in_time_is_unreachable(streamed: bool) -> None:
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # more than it queues: the next one is not answered
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        async with engine_session() as http:
            timeouts = TimeoutsConfig(connect_s=0.1)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            silent = HttpEngine(address, model="m", http=http, timeouts=timeouts)
            with pytest.raises(EngineUnreachable, match="took no connection in time") as found:
                await chunks(silent, replace(request(), streamed=streamed))
    assert (found.value.is_late, found.value.status) == (True, 503)


async def test_a_late_health_check_is_told_from_a_bad_one(
    engine: HttpEngine, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_short_timeout", aiohttp.ClientTimeout(total=0.05))
    vllm.slow_s = 5.0
    with pytest.raises(EngineTimeout) as late:
        await engine.weight_version()
    vllm.slow_s, vllm.healthy = 0.0, False
    with pytest.raises(EngineUnavailable) as bad:
        await engine.weight_version()

    assert (late.value.status, bad.value.status) == (504, 503)


async def test_closing_an_answer_closes_the_call_to_the_engine(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    closed = asyncio.Event()

    async def endless(incoming: web.Request) -> web.StreamResponse:
        response = await stream(incoming, piece([5]), done=False)
        try:
            while True:
                await response.write(piece([5]))
                await asyncio.sleep(0.005)
        except ConnectionError:
            closed.set()
            raise

    vllm.generate = endless
    async with contextlib.aclosing(engine.generate(request())) as answer:
        await anext(answer)
    async with asyncio.timeout(60):
        await closed.wait()


async def test_512_answers_stream_at_once_from_one_engine(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    all_here = asyncio.Event()

    async def wait_for_all(incoming: web.Request) -> web.StreamResponse:
        if len(vllm.bodies) == 512:
            all_here.set()
        await all_here.wait()
        return await vllm.answer(incoming)

    vllm.generate = wait_for_all
    engine._stream_timeout = aiohttp.ClientTimeout(total=60)
    answers = await asyncio.gather(*(chunks(engine) for _ in range(512)))

    assert all(len(answer) == 2 for answer in answers)


async def test_abort_uses_the_id_that_vllm_knows(engine: HttpEngine, vllm: FakeVllm) -> None:
    await engine.abort("r1")

    assert vllm.aborted == ["generate-tokens-r1"]


async def test_the_version_of_an_unhealthy_engine_is_not_told(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    assert await engine.weight_version() == "assistant/3"
    vllm.healthy = False
    with pytest.raises(EngineUnavailable) as caught:
        await engine.weight_version()
    assert caught.value.status == 503


async def test_an_engine_that_sends_elsewhere_has_failed(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    async def redirect(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": "/health"})

    vllm.generate = redirect
    with pytest.raises(EngineProtocolError) as caught:
        await chunks(engine)
    assert caught.value.status == 502


def whole(ids: list[int], *, finish: str | None = "stop", cached: int = 7) -> Handler:
    """An answer that does not stream."""

    async def answer(_: web.Request) -> web.Response:
        body = json.loads(piece(ids, finish=finish).removeprefix(b"data: "))
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        return web.json_response({**body, "usage": usage})

    return answer


async def test_a_whole_answer_says_what_a_streamed_one_does(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    vllm.generate = whole([5, 6, 2])
    (chunk,) = await chunks(engine, replace(request(), streamed=False))

    assert vllm.bodies[0]["stream"] is False
    assert "stream_options" not in vllm.bodies[0]
    assert (list(chunk.token_ids), list(chunk.logprobs)) == ([5, 6, 2], [-0.5, -0.6, -0.2])
    assert chunk.finish_reason == "stop"
    assert chunk.version_spans == [VersionSpan(version="assistant/3", start=0, end=3)]
    assert chunk.num_cached_tokens == 7


async def test_a_long_whole_answer_is_handed_on_in_pieces(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    ids = list(range(600))
    vllm.generate = whole(ids)
    found = await chunks(engine, replace(request(), streamed=False))

    assert [len(c.token_ids) for c in found] == [256, 256, 88]
    assert [n for c in found for n in c.token_ids] == ids
    assert [p for c in found for p in c.logprobs] == [-n / 10 for n in ids]
    assert [c.finish_reason for c in found] == [None, None, "stop"]
    assert [c.version_spans is None for c in found] == [True, True, False]


async def test_a_whole_answer_without_an_end_is_a_failure(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    vllm.generate = whole([5], finish=None)
    with pytest.raises(EngineAborted, match="broke off"):
        _ = await chunks(engine, replace(request(), streamed=False))


async def test_a_whole_answer_may_take_longer_than_the_pause_between_two_chunks(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    async def slow(asked: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.5)  # idle_s is 0.3
        return await whole([5, 2])(asked)

    vllm.generate = slow
    (chunk,) = await chunks(engine, replace(request(), streamed=False))

    assert list(chunk.token_ids) == [5, 2]
