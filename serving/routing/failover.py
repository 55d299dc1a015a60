"""Routes one answer through the replicas, and goes on elsewhere when a replica fails.

ASKED ──lost or unavailable, no token yet──► ASKED of another replica, each at most once
  │ ──aborted by an update, not by the caller──► ASKED again, for the missing tokens
  └──► ENDED, or failed: after the first token no other replica is tried
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
from onlinerl.serving.interaction.engine import Chunk, Generate, Sampler
from onlinerl.serving.observability.routing_metrics import RoutingMetrics
from onlinerl.serving.routing.replicas import Replica, ReplicaPool

_PER_TOKEN_PARAMETERS = frozenset(
    {
        "detokenize", "ignore_eos", "logprobs", "max_tokens", "min_p", "seed",
        "skip_special_tokens", "stop", "stop_token_ids", "temperature", "top_k", "top_p",
    }
)  # fmt: skip
"""Sampling parameters that mean the same for the rest of an answer. Grammars and penalties do not:
they depend on the tokens sampled so far, which belong to the prompt once the answer is continued.
"""

_ANOTHER_MAY_ANSWER = (EngineUnreachable, EngineDisconnected, EngineUnavailable)
"""Failures that are not about the request, so that another replica may answer it."""
_MAX_BROKEN = 1
"""Replicas that may break while they answer a request before the request is given up."""
_SEED_STEP = 1_000_003
"""Added to a request's seed when its answer is continued."""


class ChooseAlternative(Protocol):
    """Chooses another replica for a route."""

    def __call__(self, route: "Route", *, tried: Collection[Replica]) -> Replica | None:
        """A replica that is not in `tried`; None when there is none."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The arm that a request was given, and whose request it is."""

    arm: Arm
    probability: float
    """Probability with which its session was given this arm."""
    adapter: str | None
    """LoRA adapter that answers; None means the weights of the replica."""
    tenant: str
    """Tenant whose cached prefixes the request may share."""
    session_id: str | None = None
    """None for a shadow's request, whose replica is not remembered."""


class Route(Sampler):
    """How one request is answered: its arm, its replica, and another replica when that one fails.

    It may sample several completions at once. `version` and `replica` belong to the completion that
    most recently moved or finished. Until the engine reports a version, they hold the pool's last
    known one. The spans of a completion tell which version sampled each token.

    Args:
        pool: The replicas, which are told how the request went.
        assignment: What was decided for the request.
        replica: The replica to ask first.
        choose_alternative: Chooses another replica when one fails before its first token.
        max_continuations: How often an answer that an engine aborted by itself is continued.
        metrics: What is counted.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        assignment: Assignment,
        *,
        replica: Replica,
        choose_alternative: ChooseAlternative,
        max_continuations: int,
        metrics: RoutingMetrics,
    ) -> None:
        self.assignment = assignment
        self.replica = replica
        self.replica_version = replica.version or ""
        """Version of the replica's weights, which answers unless an adapter does."""
        self.has_begun = asyncio.Event()
        """Set with the first token of any completion."""
        self._pool = pool
        self._choose_alternative = choose_alternative
        self._max_continuations = max_continuations
        self._metrics = metrics
        self._running: dict[str, tuple[Replica, str]] = {}
        """Replica that samples a completion, and the id that it knows it by."""
        self._aborted: set[str] = set()
        self._broken: set[Replica] = set()

    @property
    def url(self) -> str:
        """Address of the replica."""
        return self.replica.url

    @property
    def arm(self) -> Arm:
        """The arm that answers."""
        return self.assignment.arm

    @property
    def arm_probability(self) -> float:
        """Probability with which the session was given this arm."""
        return self.assignment.probability

    @property
    def adapter(self) -> str | None:
        """LoRA adapter that answers; None means the weights of the replica."""
        return self.assignment.adapter

    @property
    def version(self) -> str:
        """The policy version that answers, `assistant/12`."""
        if self.adapter is None:
            return self.replica_version
        return f"{self._pool.policy}/{self.adapter.rpartition('@')[2]}"

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Stream a completion; the last chunk has a finish reason.

        Raises:
            EngineFailed: when the last replica to try fails, or one fails after its first token.
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
                        yield chunk
            except EngineFailed as error:
                self._pool.note_failure(replica, error)
                tried.add(replica)
                if part.num_sampled or not self._move(request, error, lost=replica, tried=tried):
                    raise
                continue
            finally:
                self._running.pop(request.request_id, None)
            if part.is_whole:
                return
            self._metrics.replicas.continued.inc()
            part = part.rest()

    async def abort(self, request_id: str) -> None:
        """Stop a completion; its stream then ends with a last chunk."""
        self._aborted.add(request_id)
        running = self._running.get(request_id)
        if running is not None:
            replica, engine_id = running
            await replica.engine.abort(engine_id)

    def _move(
        self, request: Generate, error: EngineFailed, *, lost: Replica, tried: set[Replica]
    ) -> bool:
        """Move to another replica; False when the request fails.

        A replica that could not be reached was not asked, so all others may be tried. A replica
        that broke may have broken because of this request, so only one other is put at risk.
        """
        if not isinstance(error, _ANOTHER_MAY_ANSWER) or request.request_id in self._aborted:
            return False
        if not isinstance(error, EngineUnreachable):
            self._broken.add(lost)
            if len(self._broken) > _MAX_BROKEN:
                return False
        if self.replica in tried:  # another completion of this route may have moved it already
            other = self._choose_alternative(self, tried=tried)
            if other is None:
                return False
            self._metrics.replicas.failovers.labels(self.replica.url).inc()
            self.replica, self.replica_version = other, other.version or ""
        return True

    async def _ask(self, replica: Replica, part: "Part") -> AsyncGenerator[Chunk, None]:
        request = part.request
        self._running[part.first.request_id] = replica, request.request_id
        # The version may have changed since the replica was chosen.
        self.replica_version = replica.version or self.replica_version
        routed = replace(
            request,
            adapter=self.adapter,
            cache_salt=cache_salt(self.assignment.tenant, self.version),
        )
        replica.num_running += 1
        self._metrics.replicas.running.labels(replica.url).set(replica.num_running)
        try:
            async with contextlib.aclosing(replica.engine.generate(routed)) as chunks:
                async for chunk in chunks:
                    yield self._take(replica, part, chunk)
        finally:
            replica.num_running -= 1
            self._metrics.replicas.running.labels(replica.url).set(replica.num_running)

    def _take(self, replica: Replica, part: "Part", chunk: Chunk) -> Chunk:
        part.sampled += chunk.token_ids
        if chunk.token_ids:
            self.has_begun.set()
        if chunk.finish_reason is None:
            return chunk
        if chunk.version_spans:
            self._pool.note_version(replica, chunk.version_spans[-1].version)
        self._pool.note_success(replica)
        part.end(self._own_spans(chunk.version_spans, num_tokens=len(part.sampled)))
        if self.adapter is None and part.spans:
            # The engine may have got new weights after the pool looked at it last.
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
        """The spans that are logged.

        The engine reports the version of its weights; for an adapter the version is in its name.
        """
        if spans is None or self.adapter is None:
            return None if spans is None else list(spans)
        if len(spans) > 1:  # the weights under the adapter changed, which no version expresses
            return None
        return [VersionSpan(version=self.version, start=0, end=num_tokens)] if num_tokens else []


@dataclass
class Part:
    """One call to an engine: for a whole completion, or for the missing rest of one."""

    request: Generate
    number: int = 0
    """How often the completion was continued before."""
    spans_before: list[VersionSpan] | None = None
    """Spans of the parts before; None when one of them is not known."""
    num_before: int = 0
    """Tokens of the parts before."""
    first_request: Generate | None = None
    """The request of the first part; None for that part."""

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
        return self._room > 0 and _PER_TOKEN_PARAMETERS.issuperset(self.request.sampling)

    @property
    def _room(self) -> int:
        wanted = self.request.sampling.get("max_tokens")
        return wanted - len(self.sampled) if isinstance(wanted, int) else 1

    def end(self, spans: list[VersionSpan] | None) -> None:
        """Append the spans of this part to those before; `spans` is None when any is missing."""
        before = self.spans_before if self.number else []
        if spans is None or before is None:
            self.spans = None if self.num_sampled else []
        else:
            self.spans = _merge_spans([*before, *_shift_spans(spans, by=self.num_before)])

    def rest(self) -> "Part":
        """The part that samples what is missing after this one."""
        number = self.number + 1
        request = replace(
            self.request,
            # The engine may still know the old id.
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
            # The same seed would repeat the random numbers of the first tokens.
            sampling["seed"] = seed + _SEED_STEP
        return sampling


def _shift_spans(spans: Collection[VersionSpan], *, by: int) -> list[VersionSpan]:
    return [
        VersionSpan(version=span.version, start=span.start + by, end=span.end + by)
        for span in spans
    ]


def _merge_spans(spans: Collection[VersionSpan]) -> list[VersionSpan]:
    """Merge neighbouring spans of the same version."""
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            merged[-1] = merged[-1].model_copy(update={"end": span.end})
        else:
            merged.append(span)
    return merged


def cache_salt(tenant: str, version: str) -> str:
    """Salt of the prefix cache, so that no two tenants and no two versions share cached prefixes.

    It is a hash, because vLLM refuses salts with a slash or of more than 128 characters.
    """
    return hashlib.sha256(f"{tenant}:{version}".encode()).hexdigest()
