"""What the gateway asks of an engine: token ids in, token ids with log-probabilities out.

`Engine` is the seam; `HttpEngine` here speaks to a vLLM replica, `MemoryEngine` is its twin.
"""

import json
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from onlinerl.errors import EngineFailed
from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.serving.config import TimeoutsConfig
from onlinerl.serving.sse import DONE, EventFramer

logger = logging.getLogger(__name__)

_ERROR_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class Generate:
    """One completion to sample."""

    request_id: str
    token_ids: Sequence[int]
    sampling: Mapping[str, object]
    """vLLM's SamplingParams; log-probabilities are always asked for."""
    cache_salt: str
    """Prefixes are only shared between requests of equal salt."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What an engine sent at once."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """One per token, or fewer where the engine gave none; NaN where it gave no number."""
    finish_reason: str | None = None
    """Set in the last chunk: stop, length, abort or error."""
    version_spans: Sequence[VersionSpan] | None = None
    """In the last chunk: spans over all tokens of the completion."""
    routed_experts: str | None = None


class Engine(Protocol):
    """A replica that serves one policy."""

    @property
    def url(self) -> str:
        """Its address; also its name in metrics."""

    def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        """Stream a completion; the last chunk has a finish reason.

        Raises:
            EngineFailed: when the engine refuses (its status is kept) or breaks off.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a completion; its stream then ends with a last chunk."""

    async def weight_version(self) -> str:
        """The policy version that it serves.

        Raises:
            EngineFailed: when it is not healthy.
        """


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
        self._short_timeout = aiohttp.ClientTimeout(total=timeouts.connect_s)

    @property
    def url(self) -> str:
        """Address of the replica."""
        return self._url

    async def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        """Stream a completion; closing the iterator closes the upstream call."""
        try:
            response = await self._open(request)
            async with response:
                if response.status != 200:
                    raise EngineFailed(await _error_message(response), response.status)
                async for chunk in _chunks(response):
                    yield chunk
        except TimeoutError as error:
            raise EngineFailed("the engine did not answer in time", 504) from error
        except aiohttp.ClientError as error:
            raise EngineFailed(f"the engine is not reachable: {error}", 503) from error

    async def _open(self, request: Generate) -> aiohttp.ClientResponse:
        try:
            return await self._post(request)
        except aiohttp.ServerDisconnectedError:
            # An idle connection that the engine closed just now: nothing was answered yet.
            return await self._post(request)

    async def _post(self, request: Generate) -> aiohttp.ClientResponse:
        body = {
            "request_id": request.request_id,
            "model": self._model,
            "token_ids": list(request.token_ids),
            "sampling_params": {**request.sampling, "n": 1, "logprobs": 0},
            "cache_salt": request.cache_salt,
            "stream": True,
        }
        return await self._http.post(
            f"{self._url}/inference/v1/generate", json=body, timeout=self._stream_timeout
        )

    async def abort(self, request_id: str) -> None:
        """Stop a completion. vLLM knows it under the id of its answer, which has a prefix."""
        body = {"request_ids": [f"generate-tokens-{request_id}"]}
        await self._call("POST", "/inference/v1/abort_requests", body=body)

    async def weight_version(self) -> str:
        """The stamped version of a healthy replica."""
        await self._call("GET", "/health")
        return _weight_version(await self._call("GET", "/weight_info"))

    async def _call(self, method: str, path: str, *, body: object = None) -> bytes:
        try:
            async with self._http.request(
                method, self._url + path, json=body, timeout=self._short_timeout
            ) as response:
                if response.status != 200:
                    raise EngineFailed(await _error_message(response), response.status)
                return await response.read()
        except TimeoutError as error:
            raise EngineFailed(f"{path} was not answered in time", 504) from error
        except aiohttp.ClientError as error:
            raise EngineFailed(f"{path} is not reachable: {error}", 503) from error


def _weight_version(body: bytes) -> str:
    try:
        version = json.loads(body)["weight_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineFailed(f"the engine tells no weight version: {error!r}") from error
    if not isinstance(version, str):
        raise EngineFailed(f"the engine tells {version!r} as its weight version")
    return version


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Chunk]:
    framer = EventFramer()
    finished = False
    async for piece in response.content.iter_any():
        for data in framer.feed(piece):
            if data == DONE:
                break
            chunk = parse_chunk(data)
            finished = finished or chunk.finish_reason is not None
            yield chunk
    if not finished:
        raise EngineFailed("the engine broke off an answer")


def parse_chunk(data: bytes) -> Chunk:
    """The first choice of an event of `/inference/v1/generate`.

    Raises:
        EngineFailed: for an error event or one that cannot be read.
    """
    try:
        answer = json.loads(data)
        if "error" in answer:
            raise EngineFailed(_message(answer), _status(answer))
        return _choice_chunk(answer["choices"][0]) if answer["choices"] else Chunk()
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise EngineFailed(f"the engine sent what is not a chunk: {error!r}") from error


def _choice_chunk(choice: dict[str, Any]) -> Chunk:
    token_ids = [int(token_id) for token_id in choice.get("token_ids") or ()]
    spans = choice.get("weight_versions")
    return Chunk(
        token_ids=token_ids,
        logprobs=_logprobs(choice, token_ids),
        finish_reason=choice.get("finish_reason"),
        version_spans=None if spans is None else [VersionSpan(**span) for span in spans],
        routed_experts=choice.get("routed_experts"),
    )


def _logprobs(choice: dict[str, Any], token_ids: Sequence[int]) -> list[float]:
    content = (choice.get("logprobs") or {}).get("content") or []
    return [
        float(entry["logprob"])
        if entry.get("logprob") is not None and entry.get("token_id", token_id) == token_id
        else math.nan
        for entry, token_id in zip(content, token_ids, strict=False)
    ]


async def _error_message(response: aiohttp.ClientResponse) -> str:
    body = await response.content.read(_ERROR_BYTES)
    try:
        return _message(json.loads(body))
    except (ValueError, TypeError, AttributeError):
        return f"the engine answered {response.status}"


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or answer.get("detail") or "the engine gave no reason")


def _status(answer: dict[str, Any]) -> int:
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 502
