"""One answer's way through the replicas: an `Engine` that goes on when a replica fails.

ASKED ──unreachable or 503, no token yet──► ASKED of another replica, each at most once
  │ ──aborted by an update, by nobody here──► ASKED again, for what is missing
  └──► ENDED, or failed: after the first token nothing is tried again
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from onlinerl.errors import (
    EngineDisconnected,
    EngineFailed,
    EngineUnavailable,
    EngineUnreachable,
)
from onlinerl.rollout_store.schema import Arm, VersionSpan
from onlinerl.serving.interaction.engine import Chunk, Generate
from onlinerl.serving.observability.routing_metrics import RoutingMetrics
from onlinerl.serving.routing.replicas import Replica, ReplicaPool

_SPEAKS_OF_EACH_TOKEN = frozenset(
    {
        "detokenize", "ignore_eos", "logprobs", "max_tokens", "min_p", "seed",
        "skip_special_tokens", "stop", "stop_token_ids", "temperature", "top_k", "top_p",
    }
)  # fmt: skip
"""Sampling parameters that mean the same for the rest of an answer. Grammars and penalties do not:
they also depend on the tokens of the answer so far, which are prompt when it is taken up again."""

_ANOTHER_MAY_ANSWER = (EngineUnreachable, EngineDisconnected, EngineUnavailable)
"""Failures that say nothing about the request."""
_MAX_BROKEN = 1
"""Replicas that may break over one request before it is given up."""
_SEED_STEP = 1_000_003


class Alternative(Protocol):
    """Names another replica for a route, or None."""

    def __call__(self, route: "Route", *, tried: Collection[Replica]) -> Replica | None:
        """Not one of `tried`."""


class Route:
    """How one request is answered: its arm, its replica, and what happens when that one fails.

    May sample several completions at once. `version` and `replica` are those of the completion
    that moved or ended last: what the pool knew until an engine told what sampled the first token.
    The spans of a completion say what sampled each.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        *,
        replica: Replica,
        arm: Arm,
        probability: float,
        adapter: str | None,
        tenant: str,
        session_id: str | None,
        alternative: Alternative,
        max_continuations: int,
        metrics: RoutingMetrics,
    ) -> None:
        self.arm = arm
        self.arm_probability = probability
        """With which a session was given this arm."""
        self.adapter = adapter
        self.session_id = session_id
        """Whose request it is; None for a shadow's, whose place nobody needs to know."""
        self.replica = replica
        self.replica_version = replica.version or ""
        """Stamp of the replica: the version, unless an adapter answers."""
        self.began = asyncio.Event()
        """Set with the first token of any completion."""
        self._pool = pool
        self._tenant = tenant
        self._alternative = alternative
        self._max_continuations = max_continuations
        self._metrics = metrics
        self._asked: dict[str, tuple[Replica, str]] = {}
        self._aborted: set[str] = set()
        self._broken: set[Replica] = set()

    @property
    def url(self) -> str:
        """Address of the replica."""
        return self.replica.url

    @property
    def version(self) -> str:
        """The policy version that answers, `assistant/12`."""
        if self.adapter is None:
            return self.replica_version
        return f"{self._pool.policy}/{self.adapter.rpartition('@')[2]}"

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Stream a completion; the last chunk has a finish reason.

        Raises:
            EngineFailed: when the last replica to try fails, or any after its first token.
        """
        part = Part(request)
        tried: set[Replica] = set()
        while True:
            if request.request_id in self._aborted:
                yield Chunk(finish_reason="abort", version_spans=part.spans)
                return
            replica = self.replica
            try:
                async with contextlib.aclosing(self._ask(replica, part)) as chunks:
                    async for chunk in chunks:
                        if chunk.token_ids:
                            self.began.set()
                        yield chunk
            except EngineFailed as error:
                self._pool.failed(replica, error)
                tried.add(replica)
                if part.num_sampled or not self._move(request, error, tried=tried):
                    raise
                continue
            finally:
                self._asked.pop(request.request_id, None)
            if part.is_whole:
                return
            self._metrics.replicas.continued.inc()
            part = part.rest()

    async def abort(self, request_id: str) -> None:
        """Stop a completion; its stream then ends with a last chunk."""
        self._aborted.add(request_id)
        asked = self._asked.get(request_id)
        if asked is not None:
            replica, asked_id = asked
            await replica.engine.abort(asked_id)

    def _move(self, request: Generate, error: EngineFailed, *, tried: set[Replica]) -> bool:
        """Whether another replica answers in place of the one that failed.

        One that could not be reached was not asked, so all may be tried. One that broke may have
        broken over this request, so only one other is put at risk.
        """
        if not isinstance(error, _ANOTHER_MAY_ANSWER) or request.request_id in self._aborted:
            return False
        if not isinstance(error, EngineUnreachable):
            self._broken.add(self.replica)
            if len(self._broken) > _MAX_BROKEN:
                return False
        if self.replica in tried:  # another completion may have moved already
            other = self._alternative(self, tried=tried)
            if other is None:
                return False
            self._metrics.replicas.failovers.labels(self.replica.url).inc()
            self.replica, self.replica_version = other, other.version or ""
        return True

    async def _ask(self, replica: Replica, part: "Part") -> AsyncGenerator[Chunk, None]:
        request = part.request
        self._asked[part.first.request_id] = replica, request.request_id
        # The version may have changed since the replica was chosen.
        self.replica_version = replica.version or self.replica_version
        asked = replace(
            request,
            adapter=self.adapter,
            cache_salt=cache_salt(self._tenant, self.version),
        )
        replica.num_running += 1
        self._metrics.replicas.running.labels(replica.url).set(replica.num_running)
        try:
            async with contextlib.aclosing(replica.engine.generate(asked)) as chunks:
                async for chunk in chunks:
                    yield self._take(replica, part, chunk)
        finally:
            replica.num_running -= 1
            self._metrics.replicas.running.labels(replica.url).set(replica.num_running)

    def _take(self, replica: Replica, part: "Part", chunk: Chunk) -> Chunk:
        part.sampled += chunk.token_ids
        if chunk.finish_reason is None:
            return chunk
        if chunk.version_spans:
            self._pool.saw(replica, chunk.version_spans[-1].version)
        self._pool.answered(replica)
        part.end(self._own_spans(chunk.version_spans, num_tokens=len(part.sampled)))
        if self.adapter is None and part.spans:
            # The pool's last look may be older than a swap that the engine answered after.
            self.replica_version = part.spans[0].version
        if self._is_cut_short(part, chunk):
            part.is_whole = False
            return replace(chunk, finish_reason=None, version_spans=None)
        return replace(chunk, version_spans=part.spans)

    def _is_cut_short(self, part: "Part", chunk: Chunk) -> bool:
        return (
            chunk.finish_reason == "abort"
            and part.first.request_id not in self._aborted
            and part.number < self._max_continuations
            and part.can_go_on
        )

    def _own_spans(
        self, spans: Collection[VersionSpan] | None, *, num_tokens: int
    ) -> list[VersionSpan] | None:
        """Of an adapter the name is the version: the engine tells that of the weights under it."""
        if spans is None or self.adapter is None:
            return None if spans is None else list(spans)
        if len(spans) > 1:  # the weights under it changed: no version says that
            return None
        return [VersionSpan(version=self.version, start=0, end=num_tokens)] if num_tokens else []


@dataclass
class Part:
    """What is asked at once: a whole completion, or what is missing of one."""

    request: Generate
    number: int = 0
    """How often it was taken up again."""
    spans_before: list[VersionSpan] | None = None
    num_before: int = 0
    first_request: Generate | None = None

    def __post_init__(self) -> None:
        self.sampled: list[int] = []
        self.is_whole = True
        self.spans: list[VersionSpan] | None = self.spans_before

    @property
    def first(self) -> Generate:
        """The request as it came in."""
        return self.first_request or self.request

    @property
    def num_sampled(self) -> int:
        """Tokens of the completion so far."""
        return self.num_before + len(self.sampled)

    @property
    def can_go_on(self) -> bool:
        """Whether the rest can be sampled as if nothing had happened."""
        if not self.num_sampled:
            return True
        return self._room > 0 and _SPEAKS_OF_EACH_TOKEN.issuperset(self.request.sampling)

    @property
    def _room(self) -> int:
        wanted = self.request.sampling.get("max_tokens")
        return wanted - len(self.sampled) if isinstance(wanted, int) else 1

    def end(self, spans: list[VersionSpan] | None) -> None:
        """Join its spans to those of the parts before it; None when any is missing."""
        before = self.spans_before if self.number else []
        if spans is None or before is None:
            self.spans = None if self.num_sampled else []
        else:
            self.spans = _joined([*before, *_shifted(spans, by=self.num_before)])

    def rest(self) -> "Part":
        """The part after it."""
        number = self.number + 1
        request = replace(
            self.request,
            # The engine may still hold the old id.
            request_id=f"{self.first.request_id}-r{number}",
            token_ids=[*self.request.token_ids, *self.sampled],
            sampling=self._rest_of_sampling(),
        )
        return Part(request, number, self.spans, self.num_sampled, self.first)

    def _rest_of_sampling(self) -> Mapping[str, object]:
        sampling = dict(self.request.sampling)
        if not self.sampled:
            return sampling
        if isinstance(sampling.get("max_tokens"), int):
            sampling["max_tokens"] = self._room
        seed = sampling.get("seed")
        if isinstance(seed, int):
            # The same seed would draw the numbers of the first tokens once more.
            sampling["seed"] = seed + _SEED_STEP
        return sampling


def _shifted(spans: Collection[VersionSpan], *, by: int) -> list[VersionSpan]:
    return [
        VersionSpan(version=span.version, start=span.start + by, end=span.end + by)
        for span in spans
    ]


def _joined(spans: Collection[VersionSpan]) -> list[VersionSpan]:
    """Neighbours of one version as one span."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version and joined[-1].end == span.start:
            joined[-1] = joined[-1].model_copy(update={"end": span.end})
        else:
            joined.append(span)
    return joined


def cache_salt(tenant: str, version: str) -> str:
    """Keys and values are shared by no two tenants, and by no two versions.

    A hash, because vLLM refuses salts with a slash or of more than 128 characters.
    """
    return hashlib.sha256(f"{tenant}:{version}".encode()).hexdigest()
