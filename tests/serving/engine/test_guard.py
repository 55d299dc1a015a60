import asyncio
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from onlinerl.deploy.replicas.engine_control import HttpEngineControl
from onlinerl.errors import WeightsError
from onlinerl.serving.config import TimeoutsConfig
from onlinerl.serving.engine.guard import guarding
from onlinerl.serving.engine_client.http import HttpEngine, engine_session
from tests.brokers import free_port

pytestmark = pytest.mark.asyncio

SECRET = "a secret of enough characters"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Upstream:
    """What vLLM is to the guard."""

    def __init__(self) -> None:
        self.seen: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.handler: Handler = self.answer
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        return await self.handler(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        if request.path == "/weight_info":
            return web.json_response({"weight_version": "assistant/3"})
        return web.json_response({"path": request.raw_path}, headers={"x-kept": "yes"})


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", upstream.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream.port = runner.addresses[0][1]
    yield upstream
    await runner.cleanup()


@pytest.fixture
def guard(upstream: Upstream) -> Iterator[str]:
    address = f"http://127.0.0.1:{upstream.port}"
    with guarding("127.0.0.1", 0, upstream=address, secret=SECRET) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with engine_session(secret=SECRET) as session:
        yield session


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer ",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
        SECRET,
        f"bearer {SECRET}",
        f"Basic {SECRET}",
        "Bearer \udcff",
    ],
)
@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/v1/models", "/pause", "/collective_rpc", "/inference/v1/x"]
)
async def test_without_the_secret_nothing_passes(
    upstream: Upstream, guard: str, given: str | None, path: str
) -> None:
    headers = {} if given is None else {"authorization": given}
    async with aiohttp.ClientSession(headers=headers) as http:
        for method in ("GET", "POST", "OPTIONS"):
            async with http.request(method, guard + path) as response:
                assert response.status == 401
                assert SECRET not in await response.text()
    assert upstream.seen == []


async def test_with_the_secret_everything_passes_as_it_is(
    upstream: Upstream, guard: str, http: aiohttp.ClientSession
) -> None:
    url = URL(f"{guard}/pause?mode=keep&x=a%2Fb", encoded=True)
    async with http.post(url, data=b"\x00body") as response:
        answer = await response.json()

    assert (response.status, response.headers["x-kept"]) == (200, "yes")
    assert answer == {"path": "/pause?mode=keep&x=a%2Fb"}
    assert (upstream.seen[0].method, upstream.bodies) == ("POST", [b"\x00body"])
    assert "authorization" not in upstream.seen[0].headers


async def test_status_and_body_of_an_error_pass(
    upstream: Upstream, guard: str, http: aiohttp.ClientSession
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    upstream.handler = refuse
    async with http.get(f"{guard}/v1/x") as response:
        assert (response.status, await response.json()) == (
            404,
            {"error": {"message": "no such model"}},
        )


async def test_a_stream_passes_chunk_by_chunk(
    upstream: Upstream, guard: str, http: aiohttp.ClientSession
) -> None:
    """Each chunk is only made when the one before it has arrived: a buffer would hang here."""
    arrived = asyncio.Semaphore(0)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(5):
            await response.write(b"data: %d\n\n" % number)
            await arrived.acquire()
        return response

    upstream.handler = stream
    received = b""
    async with asyncio.timeout(60), http.post(f"{guard}/inference/v1/generate") as response:
        async for piece in response.content.iter_any():
            received += piece
            arrived.release()

    assert received == b"".join(b"data: %d\n\n" % number for number in range(5))


async def test_a_large_body_streams_in_and_a_large_answer_streams_out(
    upstream: Upstream, guard: str, http: aiohttp.ClientSession
) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    upstream.handler = echo
    body = b"x" * (8 * 2**20)
    async with http.post(f"{guard}/x", data=io.BytesIO(body)) as response:
        assert await response.read() == body


@pytest.mark.parametrize("first", [b"", b"data: x\n\n"], ids=["before", "after the first byte"])
async def test_a_caller_that_goes_away_ends_the_call_to_the_engine(
    upstream: Upstream, guard: str, http: aiohttp.ClientSession, first: bytes
) -> None:
    """Even while the engine says nothing, so that no write can fail."""
    thinking, gone = asyncio.Event(), asyncio.Event()

    async def think(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if first:
            await response.prepare(request)
            await response.write(first)
        thinking.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            gone.set()
            raise
        return response

    upstream.handler = think
    calling = asyncio.create_task(http.post(f"{guard}/inference/v1/generate"))
    async with asyncio.timeout(60):
        await thinking.wait()
        if first:
            response = await calling
            await response.content.readany()
            response.close()
        else:
            calling.cancel()
        await gone.wait()


async def test_an_answer_that_the_engine_breaks_off_does_not_look_whole(
    upstream: Upstream, guard: str, http: aiohttp.ClientSession
) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: x\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    upstream.handler = break_off
    with pytest.raises(aiohttp.ClientError):
        async with http.post(f"{guard}/x") as response:
            await response.read()


async def test_an_engine_that_is_not_up_yet_is_503(http: aiohttp.ClientSession) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with guarding("127.0.0.1", 0, upstream=address, secret=SECRET) as port:
        async with http.get(f"http://127.0.0.1:{port}/health") as response:
            assert response.status == 503


@pytest.mark.parametrize("target", ["@127.0.0.1:1/", "http://127.0.0.1:1/", "*"])
async def test_a_request_target_cannot_lead_elsewhere(
    upstream: Upstream, guard: str, target: str
) -> None:
    port = int(guard.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"OPTIONS {target} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SECRET}\r\n"
        "connection: close\r\n\r\n".encode()
    )
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()

    assert answer.split()[1] in (b"400", b"404")
    assert upstream.seen == []


async def test_gateway_and_controller_reach_an_engine_through_its_guard(
    upstream: Upstream, guard: str, http: aiohttp.ClientSession
) -> None:
    engine = HttpEngine(guard, model="assistant", http=http, timeouts=TimeoutsConfig())

    def replica(secret: str | None) -> HttpEngineControl:
        return HttpEngineControl(
            guard,
            policy="assistant",
            request_timeout_s=5,
            commit_timeout_s=5,
            probe_timeout_s=5,
            secret=secret,
        )

    assert await engine.weight_version() == "assistant/3"
    assert await asyncio.to_thread(replica(SECRET).stamp) == "assistant/3"
    with pytest.raises(WeightsError, match="401"):
        await asyncio.to_thread(replica(None).stamp)


async def test_the_port_is_free_again_afterwards(upstream: Upstream) -> None:
    address = f"http://127.0.0.1:{upstream.port}"
    with guarding("127.0.0.1", 0, upstream=address, secret=SECRET) as port:
        pass
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
