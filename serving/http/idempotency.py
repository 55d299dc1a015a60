"""`Idempotency-Key`: the same request with the same key gets the same answer, sampled once.

A key belongs to a tenant, an API key and a path. While the first request runs, a second one with
the same key waits for it. A replay repeats status, headers and body as they were sent, a stream
event by event. An incomplete answer (the caller left, the engine failed, it was refused) frees the
key: its tokens are logged, and the next request with the key is sampled anew.
"""

import asyncio
import contextlib
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Send

from onlinerl.errors import RequestRefused
from onlinerl.serving.config import IdempotencyConfig
from onlinerl.serving.encoding.json import sorted_json
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.observability.metrics import GatewayMetrics

Clock = Callable[[], float]
AnswerOnce = Callable[[Send], Awaitable[bool]]
"""Answers through the `send` it is given; returns True when the caller got the whole answer."""

_SYNTAX = re.compile(r"[\x20-\x7e]{1,255}")
_OVERHEAD_BYTES = 512
"""Memory that an entry takes beside the messages, estimated."""
_PARAM = "Idempotency-Key"


@dataclass(frozen=True, kw_only=True)
class IdempotentRequest:
    """A request that is answered once."""

    scope: tuple[str, str, str, str]
    """Tenant, API key, path and the caller's key."""
    digest: bytes
    """SHA-256 of everything that the answer depends on."""


def parse_idempotency_key(
    header: str | None, *, caller: Caller, path: str, body: object, terms: Sequence[str | None] = ()
) -> IdempotentRequest | None:
    """The request that the header `Idempotency-Key` identifies; None without the header.

    Args:
        header: Value of the header.
        caller: Who sent the request.
        path: The route.
        body: The parsed body; requests with equal JSON are equal.
        terms: Values of other headers that change the answer or how it is logged.

    Raises:
        RequestRefused: when the key is empty, longer than 255 characters or not printable ASCII.
    """
    if header is None:
        return None
    if _SYNTAX.fullmatch(header) is None:
        raise RequestRefused(f"{_PARAM}: give 1 to 255 printable ASCII characters", 400, _PARAM)
    text = sorted_json([body, list(terms)])
    return IdempotentRequest(
        scope=(caller.tenant, caller.name, path, header),
        digest=hashlib.sha256(text.encode()).digest(),
    )


@dataclass(eq=False, kw_only=True)
class _Entry:
    """RUNNING (`ended` pending) -> KEPT (`messages`) or UNKEPT (None, too large) or freed."""

    digest: bytes
    ended: "asyncio.Future[None]"
    messages: list[Message] | None = field(default_factory=list)
    size: int = _OVERHEAD_BYTES
    expires_at_s: float = 0.0


class Idempotency:
    """The answers of one gateway process by their keys. It belongs to one event loop.

    It is bounded by `max_entries`, `max_bytes` and `ttl_s`, including answers that are still being
    recorded. The oldest answers are dropped first. An answer that is too large by itself is served
    but not kept, and a retry gets an error that says so.
    """

    def __init__(
        self, config: IdempotencyConfig, *, metrics: GatewayMetrics, clock: Clock = time.monotonic
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str, str, str], _Entry] = OrderedDict()
        self._running: dict[tuple[str, str, str, str], _Entry] = {}
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept or being recorded."""
        return self._bytes

    async def answer(
        self, request: IdempotentRequest | None, answer: AnswerOnce, *, receive: Receive, send: Send
    ) -> None:
        """Answer through `send`, with `answer` or with what it sent before.

        Args:
            request: The request and its key; None always calls `answer`.
            answer: Called at most once per key. When it raises, the key is freed.
            receive: Watched while this request waits for another, so that it ends when its caller
                leaves.
            send: Where the answer goes.

        Raises:
            RequestRefused: 422 when the key was used for another request, 409 when its request
                is still running after `wait_s` or its answer was too large to be kept.
        """
        if request is None:
            await answer(send)
            return
        if self._config.max_entries == 0:
            raise RequestRefused(f"{_PARAM} is not supported by this gateway", 400, _PARAM)
        deadline_s = self._clock() + self._config.wait_s
        while (running := self._running.get(request.scope)) is not None:
            _check_same(running, request)
            if not await self._wait_ended(running, receive, timeout_s=deadline_s - self._clock()):
                return  # the caller left
        self._drop_expired()
        kept = self._kept.get(request.scope)
        if kept is not None:
            _check_same(kept, request)
            await self._replay(kept, send)
        else:
            await self._answer_first(request, answer, send)

    async def _wait_ended(self, entry: _Entry, receive: Receive, *, timeout_s: float) -> bool:
        """Wait until the first request has ended; False when the caller left meanwhile."""
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait(
                {entry.ended, leaving},
                timeout=max(timeout_s, 0),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if entry.ended.done():
                return True
            if leaving.done():
                return False
        finally:
            leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving
        raise RequestRefused(
            f"a request with this {_PARAM} is still being answered",
            409,
            _PARAM,
            "idempotency_key_in_use",
            {"retry-after": "1"},
        )

    async def _answer_first(
        self, request: IdempotentRequest, answer: AnswerOnce, send: Send
    ) -> None:
        entry = _Entry(digest=request.digest, ended=asyncio.get_running_loop().create_future())
        self._running[request.scope] = entry
        self._bytes += entry.size

        async def record_and_send(message: Message) -> None:
            self._record(entry, message)
            await send(message)

        is_whole = False
        try:
            is_whole = await answer(record_and_send)
        finally:
            del self._running[request.scope]
            if is_whole:
                self._keep(request, entry)
            else:
                self._bytes -= entry.size
            entry.ended.set_result(None)

    async def _replay(self, entry: _Entry, send: Send) -> None:
        if entry.messages is None:
            raise RequestRefused(
                f"the answer to this {_PARAM} was sent and was too large to be kept: "
                "use another key",
                409,
                _PARAM,
                "idempotency_answer_not_kept",
            )
        self._metrics.replayed.inc()
        for message in entry.messages:
            await send(message)

    def _record(self, entry: _Entry, message: Message) -> None:
        if entry.messages is None:
            return
        size = _size(message)
        if entry.size + size > self._config.max_bytes:
            self._give_up(entry)
            return
        self._bytes += size
        entry.size += size
        entry.messages.append(message)
        self._evict()
        if self._bytes > self._config.max_bytes:
            # Only running answers are left, and this one is too large.
            self._give_up(entry)

    def _give_up(self, entry: _Entry) -> None:
        self._bytes -= entry.size - _OVERHEAD_BYTES
        entry.size = _OVERHEAD_BYTES
        entry.messages = None

    def _keep(self, request: IdempotentRequest, entry: _Entry) -> None:
        entry.expires_at_s = self._clock() + self._config.ttl_s
        self._kept[request.scope] = entry
        self._evict()

    def _evict(self) -> None:
        config = self._config
        while self._kept and (
            len(self._kept) > config.max_entries or self._bytes > config.max_bytes
        ):
            self._drop_oldest()

    def _drop_expired(self) -> None:
        now_s = self._clock()
        while self._kept and next(iter(self._kept.values())).expires_at_s <= now_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._kept.popitem(last=False)
        self._bytes -= entry.size


def _check_same(entry: _Entry, request: IdempotentRequest) -> None:
    if entry.digest != request.digest:
        raise RequestRefused(
            f"this {_PARAM} was used for another request: use a new key for each request",
            422,
            _PARAM,
            "idempotency_key_reused",
        )


def _size(message: Message) -> int:
    headers = sum(len(name) + len(value) for name, value in message.get("headers", ()))
    return headers + len(message.get("body", b"")) + 128


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
