"""An `Engine` without a model, for tests of everything around it."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from typing_extensions import override

from onlinerl.errors import EngineFailed
from onlinerl.rollout_store.schema import VersionSpan
from onlinerl.serving.interaction.engine import Chunk, Engine, Generate, TopLogprob

Script = Callable[[Generate], Sequence[int]]
"""Gives the tokens that an engine answers a request with."""


class MemoryEngine(Engine):
    """Twin of `HttpEngine` for tests: answers with the tokens of `script`, one token a chunk.

    Its public attributes change how it behaves, also while it runs.
    """

    def __init__(
        self, script: Script, *, url: str = "memory://1", version: str = "assistant/1"
    ) -> None:
        self._script = script
        self._url = url
        self.version = version
        """Version of every token that is made from now on."""
        self.failure: EngineFailed | None = None
        """Raised instead of the next token."""
        self.hold_at: int | None = None
        """Number of tokens after which an answer waits to be aborted or released."""
        self.release = asyncio.Event()
        """Lets answers that wait at `hold_at` go on."""
        self.tokens_per_chunk = 1
        self.finish: str | None = None
        """Finish reason in place of the natural one."""
        self.spans: list[VersionSpan] | None = None
        """Version spans in place of the true ones."""
        self.logprob = -0.5
        self.with_logprobs = True
        self.top: Sequence[TopLogprob] = ()
        """Alternatives at every place, for requests that ask for them."""
        self.num_cached_tokens: int | None = None
        self.loaded: frozenset[str] = frozenset()
        """LoRA adapters that it has loaded."""
        self.stops_itself_at: int | None = None
        """Number of tokens after which the next answer is aborted, as by an update; once."""
        self.requests: list[Generate] = []
        self.aborted: list[str] = []
        self.closed: list[str] = []
        """Answers whose stream has ended, whatever the reason."""

    @property
    @override
    def url(self) -> str:
        return self._url

    @override
    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Stream the scripted tokens up to `max_tokens`."""
        self.requests.append(request)
        tokens = list(self._script(request))
        limit = request.sampling.get("max_tokens")
        served = tokens[:limit] if isinstance(limit, int) else tokens
        natural = "length" if len(served) < len(tokens) else "stop"
        versions: list[str] = []
        try:
            pending = deque(served)
            while pending and request.request_id not in self.aborted:
                await self._pace(request, num_served=len(versions))
                if request.request_id in self.aborted or self._stops_itself(len(versions)):
                    break
                step = [pending.popleft() for _ in range(min(self.tokens_per_chunk, len(pending)))]
                versions += [self.version] * len(step)
                last = natural if not pending else None
                yield self._chunk(request, step, versions=versions, finish=last)
            if pending or not served:
                finish = "abort" if pending else natural
                yield self._chunk(request, [], versions=versions, finish=finish)
        finally:
            self.closed.append(request.request_id)

    @override
    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    @override
    async def weight_version(self) -> str:
        if self.failure is not None:
            raise self.failure
        return self.version

    @override
    async def adapters(self) -> frozenset[str]:
        if self.failure is not None:
            raise self.failure
        return self.loaded

    async def _pace(self, request: Generate, *, num_served: int) -> None:
        await asyncio.sleep(0)
        while (
            self.hold_at == num_served
            and not self.release.is_set()
            and self.failure is None
            and request.request_id not in self.aborted
        ):
            await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure

    def _stops_itself(self, num_served: int) -> bool:
        if self.stops_itself_at != num_served:
            return False
        self.stops_itself_at = None
        return True

    def _chunk(
        self, request: Generate, tokens: list[int], *, versions: list[str], finish: str | None
    ) -> Chunk:
        chunk = Chunk(
            token_ids=tokens,
            logprobs=self._logprobs(tokens),
            top_logprobs=[self.top[: request.top_logprobs] for _ in tokens]
            if request.top_logprobs
            else (),
        )
        if finish is None:
            return chunk
        return replace(
            chunk,
            finish_reason=self.finish or finish,
            version_spans=_spans(versions) if self.spans is None else self.spans,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _logprobs(self, tokens: list[int]) -> list[float]:
        return [self.logprob] * len(tokens) if self.with_logprobs else []


def _spans(versions: Sequence[str]) -> list[VersionSpan]:
    spans: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = spans[-1].model_copy(update={"end": position + 1})
        else:
            spans.append(VersionSpan(version=version, start=position, end=position + 1))
    return spans
