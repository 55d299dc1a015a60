"""The routes of vLLM that the gateway uses, without a model.

Run as a program with a port and, if need be, the seconds between two tokens and a version.

Answers `max_tokens` tokens of a fixed text, slowly enough that answers overlap.
"""

import asyncio
import json
import sys

from aiohttp import web

PACE = web.AppKey("pace_s", float)
VERSION = web.AppKey("version", str)
TOKENS = [11705, 260, 2795, 30]


async def generate(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    num_tokens = min(int(body["sampling_params"]["max_tokens"]), 12)
    if not body["stream"]:
        await asyncio.sleep(num_tokens * request.app[PACE])
        return whole(num_tokens, version=request.app[VERSION])
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for position in range(num_tokens):
        last = position == num_tokens - 1
        token_id = 2 if last else TOKENS[position % len(TOKENS)]
        span = {"version": request.app[VERSION], "start": 0, "end": num_tokens}
        choice = {
            "index": 0,
            "token_ids": [token_id],
            "logprobs": {"content": [{"token_id": token_id, "logprob": -0.5}]},
            "finish_reason": "stop" if last else None,
            "weight_versions": [span] if last else None,
        }
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await asyncio.sleep(request.app[PACE])
    await response.write(b"data: [DONE]\n\n")
    return response


def whole(num_tokens: int, *, version: str) -> web.Response:
    token_ids = [TOKENS[position % len(TOKENS)] for position in range(num_tokens - 1)] + [2]
    choice = {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": {"content": [{"token_id": each, "logprob": -0.5} for each in token_ids]},
        "finish_reason": "stop",
        "weight_versions": [{"version": version, "start": 0, "end": num_tokens}],
    }
    return web.json_response({"choices": [choice]})


async def healthy(_: web.Request) -> web.Response:
    return web.Response()


async def weight_info(request: web.Request) -> web.Response:
    return web.json_response({"weight_version": request.app[VERSION]})


def main() -> None:
    app = web.Application()
    app[PACE] = float(sys.argv[2]) if len(sys.argv) > 2 else 0.005
    app[VERSION] = sys.argv[3] if len(sys.argv) > 3 else "assistant/1"
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/inference/v1/abort_requests", healthy)
    app.router.add_get("/health", healthy)
    app.router.add_get("/weight_info", weight_info)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
