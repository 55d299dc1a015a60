"""The `Engine` over HTTP: a vLLM replica, or the guard in front of one.

`completions_api` parses what vLLM sends.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

import aiohttp
from typing_extensions import override

from onlinerl.errors import (
    EngineAborted,
    EngineDisconnected,
    EngineFailed,
    EngineProtocolError,
    EngineTimeout,
    EngineUnreachable,
)
from onlinerl.serving.config import TimeoutsConfig
from onlinerl.serving.engine_client import completions_api
from onlinerl.serving.engine_client.chunk_assembler import ChunkAssembler
from onlinerl.serving.interaction.engine import Chunk, Engine, Generate

_MAX_ERROR_BYTES = 16 * 1024
_GATEWAY_STATUSES = frozenset({401, 403, 404, 405, 407})
"""Refusals that are about the gateway's configuration, not about the caller's request."""
_SLICE_TOKENS = 256
"""Tokens of a whole answer that are passed on at once, so that other answers get their turn."""
_KEEP_IDLE_S = 4.0
"""Idle connections are closed before vLLM's server closes them, after 5 s."""


def engine_session(*, secret: str | None = None) -> aiohttp.ClientSession:
    """Connections to engines. Their number is not bounded here, but by the answers in flight.

    Args:
        secret: What a guard in front of an engine asks for; sent to every engine.
    """
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
    return aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)


class HttpEngine(Engine):
    """The `Engine` over vLLM's `/inference/v1/generate`.

    Args:
        url: Address of the replica.
        model: Name under which it serves the base weights.
        http: Connections, owned by the caller.
        timeouts: How long to wait for it.
    """

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
    @override
    def url(self) -> str:
        return self._url

    @override
    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Sample a completion; closing the iterator closes the call to the engine."""
        with _generate_errors():
            response = await self._open(request)
            async with response:
                if response.status != 200:
                    raise await _refusal(response)
                read = _read_stream if request.streamed else _read_whole
                chunks = read(response, num_top=request.top_logprobs)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk

    async def _open(self, request: Generate) -> aiohttp.ClientResponse:
        try:
            return await self._post(request)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # The engine closed an idle connection just now: it answered nothing, and the second
            # attempt opens a new connection. If none could be opened, another engine is asked.
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

    @override
    async def abort(self, request_id: str) -> None:
        # vLLM knows a completion under the id of its answer, which has a prefix.
        body = {"request_ids": [f"generate-tokens-{request_id}"]}
        await self._call("POST", "/inference/v1/abort_requests", body=body)

    @override
    async def weight_version(self) -> str:
        await self._call("GET", "/health")
        return completions_api.weight_version(await self._call("GET", "/weight_info"))

    @override
    async def adapters(self) -> frozenset[str]:
        return completions_api.adapters(await self._call("GET", "/v1/models"), base=self._model)

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
            raise EngineTimeout(f"{path} was not answered in time") from error
        except aiohttp.ClientError as error:
            raise EngineDisconnected(f"{path} was not answered: {error}") from error


@contextlib.contextmanager
def _generate_errors() -> Iterator[None]:
    """Errors of aiohttp as errors by cause."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise EngineUnreachable(f"the engine is not reachable: {error}") from error
    except aiohttp.ConnectionTimeoutError as error:
        raise EngineUnreachable("the engine took no connection in time", is_late=True) from error
    except TimeoutError as error:
        raise EngineTimeout("the engine did not answer in time") from error
    except aiohttp.ClientError as error:
        raise EngineDisconnected(f"the connection to the engine broke: {error}") from error
    except ValueError as error:
        raise EngineProtocolError(f"could not parse the engine's event stream: {error}") from error


async def _read_stream(
    response: aiohttp.ClientResponse, *, num_top: int
) -> AsyncGenerator[Chunk, None]:
    assembler = ChunkAssembler(num_top=num_top)
    is_first = True
    async for data in response.content.iter_any():
        for chunk in assembler.feed(data):
            yield chunk
            if is_first:
                # The reader of the first token gets a turn before the rest is parsed.
                is_first = False
                await asyncio.sleep(0)
    yield assembler.finish()


async def _read_whole(
    response: aiohttp.ClientResponse, *, num_top: int
) -> AsyncGenerator[Chunk, None]:
    chunk = completions_api.parse_chunk(await response.read(), num_top=num_top)
    if chunk.finish_reason is None:
        raise EngineAborted("the engine broke off an answer")
    for part in completions_api.slice_chunk(chunk, size=_SLICE_TOKENS):
        yield part
        await asyncio.sleep(0)


async def _refusal(response: aiohttp.ClientResponse) -> EngineFailed:
    """The cause of an answer whose status is not 200.

    Redirects count as failures, because engines are only named in the configuration.
    """
    body = await response.content.read(_MAX_ERROR_BYTES)
    message = completions_api.error_message(body, status=response.status)
    if response.status < 400 or response.status in _GATEWAY_STATUSES:
        return EngineProtocolError(message)
    return completions_api.failure_of(response.status, message)
