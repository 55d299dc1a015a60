"""The `Engine` over HTTP: a vLLM replica, or the guard in front of one.

What vLLM writes is read in `engine_wire`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

import aiohttp

from onlinerl.errors import EngineFailed, EngineUnreachable
from onlinerl.serving.config import TimeoutsConfig
from onlinerl.serving.encoding.sse import DONE, EventFramer
from onlinerl.serving.engine_client import completions_api as engine_wire
from onlinerl.serving.interaction.engine import Chunk, Generate

_ERROR_BYTES = 16 * 1024
_NOT_THE_CALLERS = frozenset({401, 403, 404, 405, 407})
_SLICE = 256
"""Tokens of a whole answer that are handed on at once: others get their turn between."""
_KEEP_IDLE_S = 4.0
"""Idle connections are closed before vLLM's server does it, after 5 s."""


def engine_session(*, secret: str | None = None) -> aiohttp.ClientSession:
    """Connections to engines. Not bounded here: the gateway bounds the answers in flight.

    Args:
        secret: What a guard in front of an engine asks for; sent to every engine.
    """
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
    return aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)


class HttpEngine:
    """The `Engine` over vLLM's `/inference/v1/generate`."""

    def __init__(
        self, url: str, *, model: str, http: aiohttp.ClientSession, timeouts: TimeoutsConfig
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._http = http
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=timeouts.connect_s, sock_read=timeouts.idle_s
        )
        self._whole_timeout = aiohttp.ClientTimeout(
            total=timeouts.whole_s, sock_connect=timeouts.connect_s
        )
        self._short_timeout = aiohttp.ClientTimeout(total=timeouts.connect_s)

    @property
    def url(self) -> str:
        """Address of the replica."""
        return self._url

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Sample a completion; closing the iterator closes the upstream call."""
        try:
            response = await self._open(request)
            async with response:
                if response.status != 200:
                    raise await _refusal(response)
                read = _chunks if request.streamed else _slices
                chunks = read(response, num_top=request.top_logprobs)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(f"the engine is not reachable: {error}") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnreachable(
                "the engine took no connection in time", is_late=True
            ) from error
        except TimeoutError as error:
            raise EngineFailed("the engine did not answer in time", 504) from error
        except aiohttp.ClientError as error:
            raise EngineFailed(f"the connection to the engine broke: {error}", 503) from error
        except ValueError as error:
            raise EngineFailed(f"the engine sent what is no stream: {error}") from error

    async def _open(self, request: Generate) -> aiohttp.ClientResponse:
        try:
            return await self._post(request)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # An idle connection that the engine closed just now: nothing was answered yet, and the
            # second try opens a fresh one. Where none could be opened, another engine is asked.
            if isinstance(error, aiohttp.ClientConnectorError):
                raise
            return await self._post(request)

    async def _post(self, request: Generate) -> aiohttp.ClientResponse:
        # The engine counts the sampled token among the alternatives, so one more is asked for.
        num_logprobs = request.top_logprobs + 1 if request.top_logprobs else 0
        body = {
            "request_id": request.request_id,
            "model": request.adapter or self._model,
            "token_ids": list(request.token_ids),
            "sampling_params": {**request.sampling, "n": 1, "logprobs": num_logprobs},
            "cache_salt": request.cache_salt,
            "stream": request.streamed,
        }
        if request.streamed:
            body["stream_options"] = {"include_usage": True}
        return await self._http.post(
            f"{self._url}/inference/v1/generate",
            json=body,
            headers=request.headers,
            timeout=self._stream_timeout if request.streamed else self._whole_timeout,
            allow_redirects=False,
        )

    async def abort(self, request_id: str) -> None:
        """Stop a completion. vLLM knows it under the id of its answer, which has a prefix."""
        body = {"request_ids": [f"generate-tokens-{request_id}"]}
        await self._call("POST", "/inference/v1/abort_requests", body=body)

    async def weight_version(self) -> str:
        """The stamped version of a healthy replica."""
        await self._call("GET", "/health")
        return engine_wire.weight_version(await self._call("GET", "/weight_info"))

    async def adapters(self) -> frozenset[str]:
        """Every model that it lists beside the base."""
        return engine_wire.adapters(await self._call("GET", "/v1/models"), base=self._model)

    async def _call(self, method: str, path: str, *, body: object = None) -> bytes:
        try:
            async with self._http.request(
                method,
                self._url + path,
                json=body,
                timeout=self._short_timeout,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                return await response.read()
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(f"{path} is not reachable: {error}") from error
        except TimeoutError as error:
            raise EngineFailed(f"{path} was not answered in time", 504) from error
        except aiohttp.ClientError as error:
            # A connection that breaks says as little as an answer that does not come.
            raise EngineFailed(f"{path} was not answered: {error}", 504) from error


async def _chunks(response: aiohttp.ClientResponse, *, num_top: int) -> AsyncGenerator[Chunk, None]:
    """The last chunk is held until the usage that follows it was read."""
    framer = EventFramer()
    last: Chunk | None = None
    begun = False
    async for piece in response.content.iter_any():
        # What came at once goes on at once: a busy gateway handles fewer, larger chunks.
        arrived: list[Chunk] = []
        for data in framer.feed(piece):
            if data == DONE:
                break
            chunk = engine_wire.parse_chunk(data, num_top=num_top)
            if last is not None:
                cached = chunk.num_cached_tokens
                last = last if cached is None else replace(last, num_cached_tokens=cached)
            elif chunk.finish_reason is not None:
                last = chunk
            elif not begun and chunk.token_ids:
                # The first token waits for no other: who reads it gets a turn before the rest.
                begun = True
                yield chunk
                await asyncio.sleep(0)
            elif chunk.token_ids:
                arrived.append(chunk)
        for chunk in engine_wire.joined(arrived):
            yield chunk
    if last is None:
        raise EngineFailed("the engine broke off an answer")
    yield last


async def _slices(response: aiohttp.ClientResponse, *, num_top: int) -> AsyncGenerator[Chunk, None]:
    """An answer that came whole."""
    chunk = engine_wire.parse_chunk(await response.read(), num_top=num_top)
    if chunk.finish_reason is None:
        raise EngineFailed("the engine broke off an answer")
    for each in engine_wire.sliced(chunk, size=_SLICE):
        yield each
        await asyncio.sleep(0)


async def _refusal(response: aiohttp.ClientResponse) -> EngineFailed:
    body = await response.content.read(_ERROR_BYTES)
    message = engine_wire.error_message(body, status=response.status)
    # Only the configuration names engines: one that sends elsewhere has failed. And one that does
    # not know the gateway, or what it asks for, says nothing about the caller.
    is_about_the_request = response.status >= 400 and response.status not in _NOT_THE_CALLERS
    return EngineFailed(message, response.status if is_about_the_request else 502)
