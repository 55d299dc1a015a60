import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from onlinerl.errors import EngineFailed
from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.serving.config import TimeoutsConfig
from onlinerl.serving.engine_client import Chunk, Generate, HttpEngine, parse_chunk
from onlinerl.serving.replicas import ReplicaPool

pytestmark = pytest.mark.asyncio

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeVllm:
    """A server with the routes of vLLM that the gateway uses."""

    def __init__(self) -> None:
        self.generate: Handler = self.answer
        self.healthy = True
        self.weight_info = b'{"weight_version": "assistant/3"}'
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.num_closed = 0

    async def on_generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await self.generate(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return await stream(request, piece([5, 6]), piece([2], finish="stop"))

    async def on_abort(self, request: web.Request) -> web.Response:
        self.aborted += (await request.json())["request_ids"]
        return web.Response()

    async def on_health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def on_weight_info(self, _: web.Request) -> web.Response:
        return web.Response(body=self.weight_info)


def piece(ids: list[int], *, finish: str | None = None) -> bytes:
    content = [{"token_id": n, "logprob": -n / 10, "rank": 1, "top_logprobs": []} for n in ids]
    spans = [{"version": "assistant/3", "start": 0, "end": 3}] if finish else None
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "weight_versions": spans,
    }
    return b"data: " + json.dumps({"request_id": "r", "choices": [choice]}).encode() + b"\n\n"


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
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    timeouts = TimeoutsConfig(connect_s=1, idle_s=0.3)
    async with aiohttp.ClientSession() as http:
        yield HttpEngine(f"http://127.0.0.1:{port}/", model="m", http=http, timeouts=timeouts)
    await runner.cleanup()


def request() -> Generate:
    return Generate(request_id="r1", token_ids=[1, 2], sampling={"n": 3}, cache_salt="a:b")


async def chunks(engine: HttpEngine) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request())]


async def test_chunks_hold_ids_logprobs_and_spans(engine: HttpEngine) -> None:
    first, last = await chunks(engine)

    assert (first.token_ids, first.logprobs, first.finish_reason) == ([5, 6], [-0.5, -0.6], None)
    assert (last.token_ids, last.finish_reason) == ([2], "stop")
    assert last.version_spans == [VersionSpan(version="assistant/3", start=0, end=3)]


async def test_a_request_always_streams_one_completion_with_logprobs(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    await chunks(engine)

    (sent,) = vllm.bodies
    assert sent["sampling_params"] == {"n": 1, "logprobs": 0}
    assert (sent["request_id"], sent["cache_salt"], sent["stream"]) == ("r1", "a:b", True)
    assert (sent["model"], sent["token_ids"]) == ("m", [1, 2])


async def test_a_refusal_keeps_status_and_message(engine: HttpEngine, vllm: FakeVllm) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)

    vllm.generate = refuse
    with pytest.raises(EngineFailed, match="too long") as caught:
        await chunks(engine)
    assert caught.value.status == 400


async def test_an_error_event_breaks_the_stream(engine: HttpEngine, vllm: FakeVllm) -> None:
    async def fail(incoming: web.Request) -> web.StreamResponse:
        error = b'data: {"error": {"message": "boom", "code": 500}}\n\n'
        return await stream(incoming, piece([5]), error)

    vllm.generate = fail
    with pytest.raises(EngineFailed, match="boom") as caught:
        await chunks(engine)
    assert caught.value.status == 500


async def test_a_stream_without_a_finish_reason_was_broken_off(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    vllm.generate = lambda incoming: stream(incoming, piece([5]), done=False)
    with pytest.raises(EngineFailed, match="broke off"):
        await chunks(engine)


async def test_a_silent_engine_times_out(engine: HttpEngine, vllm: FakeVllm) -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    vllm.generate = hang
    with pytest.raises(EngineFailed) as caught:
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
    with pytest.raises(EngineFailed):
        await chunks(engine)
    assert len(vllm.bodies) == 1


async def test_an_engine_that_is_not_there_is_503(engine: HttpEngine) -> None:
    async with aiohttp.ClientSession() as http:
        timeouts = TimeoutsConfig(connect_s=1)
        absent = HttpEngine("http://127.0.0.1:9", model="m", http=http, timeouts=timeouts)
        with pytest.raises(EngineFailed) as caught:
            await chunks(absent)
        assert caught.value.status == 503
        with pytest.raises(EngineFailed):
            await absent.weight_version()


async def test_abort_uses_the_id_that_vllm_knows(engine: HttpEngine, vllm: FakeVllm) -> None:
    await engine.abort("r1")

    assert vllm.aborted == ["generate-tokens-r1"]


async def test_the_version_of_an_unhealthy_engine_is_not_told(
    engine: HttpEngine, vllm: FakeVllm
) -> None:
    assert await engine.weight_version() == "assistant/3"
    vllm.healthy = False
    with pytest.raises(EngineFailed) as caught:
        await engine.weight_version()
    assert caught.value.status == 503


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"{", b'{"weight_version": null}'])
async def test_an_engine_that_tells_no_version_is_kept_out(
    engine: HttpEngine, vllm: FakeVllm, body: bytes
) -> None:
    pool = ReplicaPool([engine], policy="assistant", poll_s=1)
    await pool.look(pool.replicas[0])
    before = pool.fault()
    vllm.weight_info = body
    with pytest.raises(EngineFailed, match="weight version"):
        await engine.weight_version()
    await pool.look(pool.replicas[0])

    assert before is None
    assert "weight version" in (pool.fault() or "")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}], [-1.0, -2.0]),
        ([{"token_id": 5, "logprob": -1.0}], [-1.0]),
        ([{"token_id": 5, "logprob": None}, {"token_id": 7, "logprob": -2.0}], [math.nan] * 2),
        (None, []),
    ],
    ids=["whole", "short", "null and of another token", "none"],
)
async def test_logprobs_are_taken_as_they_are(content: Any, expected: list[float]) -> None:
    choice = {"token_ids": [5, 6], "logprobs": {"content": content}}
    chunk = parse_chunk(json.dumps({"choices": [choice]}).encode())

    assert str(chunk.logprobs) == str(expected)


@pytest.mark.parametrize("data", [b"{", b"[]", b'"x"', b'{"choices": [{"token_ids": ["x"]}]}'])
async def test_what_is_no_chunk_is_an_engine_failure(data: bytes) -> None:
    with pytest.raises(EngineFailed, match="not a chunk"):
        parse_chunk(data)
