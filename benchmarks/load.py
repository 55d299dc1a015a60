"""Timed requests to a chat endpoint, one at a time or many at once."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from benchmarks.processes import KEY

MESSAGES = [{"role": "user", "content": "How do I reset my password?"}]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that answers a POST with a body or a stream of server-sent events."""

    name: str
    url: str
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)


def chat_target(name: str, url: str, *, stream: bool) -> Target:
    """A chat request for 100 tokens."""
    return Target(
        name=name,
        url=f"{url}/v1/chat/completions",
        body={"model": "assistant", "messages": MESSAGES, "max_tokens": 100, "stream": stream},
        headers={"authorization": f"Bearer {KEY}"},
    )


@dataclass(kw_only=True)
class Timings:
    """The timings of a run of requests."""

    total_ms: list[float] = field(default_factory=list)
    """Time to the end of each answer, milliseconds."""
    first_ms: list[float] = field(default_factory=list)
    """Time to the first byte of each body, milliseconds."""
    ids: list[str] = field(default_factory=list)
    """Interaction ids, empty where the target sends none."""
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def per_s(self) -> float:
        """Answers per second."""
        return len(self.total_ms) / self.wall_s

    def add(self, other: "Timings") -> None:
        """Add the timings of another run."""
        self.total_ms += other.total_ms
        self.first_ms += other.first_ms
        self.ids += other.ids
        self.errors += other.errors
        self.wall_s += other.wall_s


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of `values` lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


async def run(target: Target, *, num_requests: int, concurrency: int) -> Timings:
    """Send `num_requests` requests, `concurrency` at once, over connections that are reused."""
    timings = Timings()
    left = iter(range(num_requests))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def ask() -> None:
            for _ in left:
                await _one(http, target, timings)

        started = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(concurrency)))
        timings.wall_s = time.perf_counter() - started
    return timings


async def _one(http: aiohttp.ClientSession, target: Target, timings: Timings) -> None:
    started = time.perf_counter()
    first: float | None = None
    try:
        async with http.post(target.url, json=target.body, headers=target.headers) as response:
            end = b""
            async for piece in response.content.iter_any():
                first = first or time.perf_counter()
                end = (end + piece)[-64:]
            if response.status != 200:
                timings.errors.append(f"{response.status}: {end!r}")
                return
            if target.body.get("stream") and b"[DONE]" not in end:
                timings.errors.append(f"the stream was cut off: {end!r}")
                return
            timings.ids.append(response.headers.get("x-onlinerl-interaction-id", ""))
    except (aiohttp.ClientError, TimeoutError) as error:
        timings.errors.append(repr(error))
        return
    ended = time.perf_counter()
    timings.total_ms.append((ended - started) * 1e3)
    timings.first_ms.append(((first or ended) - started) * 1e3)
