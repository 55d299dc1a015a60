"""Requests to a chat endpoint, timed: one at a time or many at once."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from benchmarks.processes import KEY

MESSAGES = [{"role": "user", "content": "How do I reset my password?"}]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that answers a POST with an answer or a stream of server-sent events."""

    name: str
    url: str
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)


def chat_target(name: str, url: str, *, stream: bool) -> Target:
    """A chat request of 100 tokens."""
    return Target(
        name=name,
        url=f"{url}/v1/chat/completions",
        body={"model": "assistant", "messages": MESSAGES, "max_tokens": 100, "stream": stream},
        headers={"authorization": f"Bearer {KEY}"},
    )


@dataclass(kw_only=True)
class Timings:
    """What a run of requests took, milliseconds."""

    total_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    """To the first byte of the body."""
    ids: list[str] = field(default_factory=list)
    """Interaction ids, where the target says them."""
    errors: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return len(self.total_ms) / self.wall_s

    def add(self, other: "Timings") -> None:
        """Take in another run."""
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
    """Ask `num_requests` times, `concurrency` at once; the connections are warm after the first."""
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
                timings.errors.append(f"cut: {end!r}")
                return
            timings.ids.append(response.headers.get("x-onlinerl-interaction-id", ""))
    except (aiohttp.ClientError, TimeoutError) as error:
        timings.errors.append(repr(error))
        return
    ended = time.perf_counter()
    timings.total_ms.append((ended - started) * 1e3)
    timings.first_ms.append(((first or ended) - started) * 1e3)
