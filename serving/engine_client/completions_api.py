"""Parses what vLLM sends into our values. Pure functions of bytes.

`parse_chunk` runs once per sampled token, so its JSON is decoded straight into the fields in use.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from onlinerl.errors import (
    EngineFailed,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.serving.interaction.engine import Chunk, TopLogprob


class _Top(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None = None


class _Entry(msgspec.Struct):
    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[dict[str, Any]] | None = None
    routed_experts: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


def parse_chunk(data: bytes, *, num_top: int = 0) -> Chunk:
    """Parse an event of `/inference/v1/generate`: its first choice, or the usage after it.

    An answer that is not streamed has the same form and holds everything.

    Args:
        data: JSON.
        num_top: Most likely tokens to keep at every place.

    Raises:
        EngineFailed: the cause that an error event tells.
        EngineProtocolError: when the event cannot be read.
    """
    try:
        event = _EVENTS.decode(data)
        if event.error is not None:
            answer = json.loads(data)
            raise failure_of(_status(answer), _message(answer))
        if event.choices is None:
            raise ValueError("it has no choices")
        if not event.choices:
            return Chunk(num_cached_tokens=_cached(event.usage))
        return _chunk(event.choices[0], num_top=num_top, usage=event.usage)
    except ValueError as error:  # which msgspec's and pydantic's errors are, too
        raise EngineProtocolError(
            f"could not parse the engine's response as a completion chunk: {error!r}"
        ) from error


def merge_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Merge chunks without a finish reason into one, unless a log-probability is missing."""
    if len(chunks) < 2 or not all(_is_even(chunk) for chunk in chunks):
        return list(chunks)
    return [
        replace(
            chunks[0],
            token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
            logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
            top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs],
        )
    ]


def slice_chunk(chunk: Chunk, *, size: int) -> list[Chunk]:
    """Cut a whole answer into chunks of at most `size` tokens; the last has the finish reason."""
    num_tokens = len(chunk.token_ids)
    if num_tokens <= size or not _is_even(chunk):
        return [chunk]
    starts = range(0, num_tokens, size)
    parts = [
        Chunk(
            token_ids=chunk.token_ids[start : start + size],
            logprobs=chunk.logprobs[start : start + size],
            top_logprobs=chunk.top_logprobs[start : start + size],
        )
        for start in starts
    ]
    last = replace(
        chunk,
        token_ids=parts[-1].token_ids,
        logprobs=parts[-1].logprobs,
        top_logprobs=parts[-1].top_logprobs,
    )
    return [*parts[:-1], last]


def _is_even(chunk: Chunk) -> bool:
    """Whether every token has its own entries, so that another chunk's entries can follow."""
    num_tokens = len(chunk.token_ids)
    return (
        len(chunk.logprobs) == num_tokens
        and len(chunk.top_logprobs) in (0, num_tokens)
        and chunk.routed_experts is None
    )


def _chunk(choice: _Choice, *, num_top: int, usage: _Usage | None) -> Chunk:
    token_ids = choice.token_ids or []
    content = (choice.logprobs and choice.logprobs.content) or []
    finish = choice.finish_reason
    return Chunk(
        token_ids=token_ids,
        logprobs=_logprobs(content, token_ids),
        top_logprobs=[_top(entry, num_top=num_top) for entry in content] if num_top else (),
        finish_reason=finish,
        version_spans=None if finish is None else _spans(choice.weight_versions),
        routed_experts=choice.routed_experts,
        num_cached_tokens=None if finish is None else _cached(usage),
    )


def _logprobs(content: Sequence[_Entry], token_ids: Sequence[int]) -> list[float]:
    return [
        entry.logprob
        if entry.logprob is not None and entry.token_id in (token_id, None)
        else math.nan
        for entry, token_id in zip(content, token_ids, strict=False)
    ]


def _top(entry: _Entry, *, num_top: int) -> list[TopLogprob]:
    """The alternatives by rank; vLLM puts the sampled token first whatever its rank is."""
    ranked = sorted(
        (each.rank, each.token_id, each.logprob)
        for each in entry.top_logprobs or ()
        if each.rank is not None and each.rank <= num_top
    )
    return [TopLogprob(token_id=token_id, logprob=logprob) for _, token_id, logprob in ranked]


def _spans(spans: Sequence[dict[str, Any]] | None) -> list[VersionSpan] | None:
    if spans is None:
        return None
    return [VersionSpan.model_validate(span, strict=True) for span in spans]


def _cached(usage: _Usage | None) -> int | None:
    details = None if usage is None else usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def weight_version(body: bytes) -> str:
    """The version in an answer of `/weight_info`.

    Raises:
        EngineProtocolError: when it holds none.
    """
    try:
        version = json.loads(body)["weight_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineProtocolError(
            f"the engine's /weight_info holds no weight version: {error!r}"
        ) from error
    if not isinstance(version, str):
        raise EngineProtocolError(
            f"the engine's /weight_info holds {version!r} as weight version, which is no text"
        )
    return version


def adapters(body: bytes, *, base: str) -> frozenset[str]:
    """The names in an answer of `/v1/models`, without `base`.

    Raises:
        EngineProtocolError: when it cannot be read.
    """
    try:
        names = [model["id"] for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineProtocolError(f"the engine's /v1/models holds no models: {error!r}") from error
    return frozenset(name for name in names if isinstance(name, str) and name != base)


def error_message(body: bytes, *, status: int) -> str:
    """Why an engine refused: its own message, or else its status."""
    try:
        return _message(json.loads(body))
    except (ValueError, TypeError, AttributeError):
        return f"the engine answered {status}"


def failure_of(status: int, message: str) -> EngineFailed:
    """The cause behind an error that an engine answered with this HTTP status."""
    if status == 502:
        return EngineProtocolError(message)
    if status == 503:
        return EngineUnavailable(message)
    return EngineTimeout(message) if status == 504 else EngineRefused(message, status)


def _message(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or answer.get("detail") or "the engine gave no reason")


def _status(answer: dict[str, Any]) -> int:
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 502
