"""A server of uvicorn behind a real port, and callers that send bytes as they like."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from onlinerl.serving.http.bounded_http import bounded_http

MAX_HEAD = 2048


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers how long the body was."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(timeout_s: float = 30.0) -> AsyncIterator[int]:
    """The port of a server with these bounds."""
    http = bounded_http(max_head_bytes=MAX_HEAD, timeout_s=timeout_s)
    server = uvicorn.Server(
        uvicorn.Config(echo, port=0, http=http, lifespan="off", log_config=None)
    )
    running = asyncio.create_task(server._serve())
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.001)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def answered(port: int, *pieces: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            return await reader.read()
    finally:
        writer.close()


def post(body: bytes, *, padding: int = 0, closing: bool = True) -> bytes:
    close = b"connection: close\r\n" if closing else b""
    return b"POST / HTTP/1.1\r\nhost: x\r\nx-padding: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
        b"a" * padding,
        close,
        len(body),
        body,
    )


async def test_bodies_and_requests_that_follow_are_not_counted() -> None:
    size = 20 * MAX_HEAD
    asked = post(b"b" * size, padding=MAX_HEAD // 2, closing=False)
    async with serving() as port:
        together = await answered(port, asked * 3 + post(b""))
        cut = [asked[at : at + 500] for at in range(0, len(asked), 500)]
        in_pieces = await answered(port, *cut, *cut, post(b""))

    assert together.count(b"200 OK") == 4
    assert in_pieces.count(b"200 OK") == 3
    assert in_pieces.count(b"\r\n\r\n%d" % size) == 2


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n"])
async def test_a_head_without_an_end_is_refused(begin: bytes) -> None:
    more = b"x: y\r\n" * 100 if begin.endswith(b"\r\n") else b"a" * 600
    async with serving() as port:
        answer = await answered(port, post(b"first", closing=False), begin, *[more] * 4)

    assert answer.count(b"200 OK") == 1
    assert answer.endswith(b"The head of the request is too large.")


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nx: y\r\n"])
async def test_a_head_that_does_not_come_ends_the_connection(begin: bytes) -> None:
    async with serving(timeout_s=0.5) as port:
        assert await answered(port, begin) == b""
        kept = await answered(port, post(b"first", closing=False), b"GET /")

    assert kept.count(b"200 OK") == 1


async def test_a_head_that_came_in_time_leaves_the_rest_its_own_time() -> None:
    async with serving(timeout_s=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head, _, body = post(b"body").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        await asyncio.sleep(0.8)
        writer.write(body)
        async with asyncio.timeout(60):
            assert (await reader.read()).endswith(b"\r\n\r\n4")
        writer.close()
