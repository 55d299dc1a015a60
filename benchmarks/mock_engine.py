"""An engine without a model that replays recorded answers of vLLM, chunk by chunk.

`python -m benchmarks.mock_engine PORT [STEP_S]` waits `STEP_S` seconds before each chunk, by
default not at all. It answers the route that the gateway uses and OpenAI's chat route, which a
proxy uses. `python -m benchmarks.record` makes the recordings.
"""

import asyncio
import json
import sys

import uvloop
from aiohttp import web

from benchmarks.recorded import RECORDED

STEP_S = web.AppKey("step_s", float)


def events(name: str) -> list[bytes]:
    """The server-sent events of a recording, each with its blank line."""
    whole = (RECORDED / name).read_bytes()
    return [event + b"\n\n" for event in whole.split(b"\n\n") if event.strip()]


GENERATE = events("generate.sse")
CHAT = events("chat.sse")
GENERATE_WHOLE = (RECORDED / "generate.json").read_bytes()
CHAT_WHOLE = (RECORDED / "chat.json").read_bytes()


async def _replay(request: web.Request, recording: list[bytes]) -> web.StreamResponse:
    step_s = request.app[STEP_S]
    await request.read()
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in recording:
        # Yield to the loop between two writes, so that chunks leave one by one as from an engine.
        await asyncio.sleep(step_s)
        await response.write(event)
    await response.write_eof()
    return response


async def generate(request: web.Request) -> web.StreamResponse:
    """`/inference/v1/generate`, whole or streamed."""
    if json.loads(await request.read())["stream"]:
        return await _replay(request, GENERATE)
    return await _whole(request, GENERATE_WHOLE)


async def _whole(request: web.Request, recording: bytes) -> web.Response:
    if request.app[STEP_S]:
        await asyncio.sleep(request.app[STEP_S] * len(GENERATE))
    return web.Response(body=recording, content_type="application/json")


async def chat(request: web.Request) -> web.StreamResponse:
    """`/v1/chat/completions`, whole or streamed."""
    body = await request.json()
    if body.get("stream"):
        return await _replay(request, CHAT)
    return await _whole(request, CHAT_WHOLE)


async def healthy(_: web.Request) -> web.Response:
    """An empty answer with status 200."""
    return web.json_response({})


async def weight_info(_: web.Request) -> web.Response:
    """The version id of the recording."""
    return web.json_response({"weight_version": "assistant/1"})


def main() -> None:
    """Serve until killed."""
    app = web.Application()
    app[STEP_S] = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/inference/v1/abort_requests", healthy)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", healthy)
    app.router.add_get("/weight_info", weight_info)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, backlog=2048)


if __name__ == "__main__":
    main()
