"""The seam to engines: token ids in, token ids with log-probabilities out.

`HttpEngine` speaks to a vLLM replica, and `MemoryEngine` is its twin for tests. The room `routing`
decides which engine is asked and what happens when it fails.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from onlinerl.rollout_store.schema import VersionSpan


@dataclass(frozen=True, kw_only=True)
class Generate:
    """One completion to sample."""

    request_id: str
    token_ids: Sequence[int]
    sampling: Mapping[str, object]
    """vLLM's SamplingParams; log-probabilities are always requested as well."""
    cache_salt: str = ""
    """Cached prefixes are shared only between requests with the same salt; the route sets it."""
    adapter: str | None = None
    """LoRA adapter that answers, e.g. `assistant@12`; None means the weights of the replica."""
    top_logprobs: int = 0
    """Number of most likely tokens to return at every place."""
    streamed: bool = True
    """Whether chunks are wanted as they are sampled. Otherwise they come together after the last
    token. That takes engine and gateway a tenth of the work, and an engine that dies has served
    nothing yet."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers to send, e.g. the context of a trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a place."""

    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Part of a completion, as an engine sent it."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """One per token, or fewer when the engine sent fewer; NaN where it sent no number."""
    top_logprobs: Sequence[Sequence[TopLogprob]] = ()
    """One list per token, the most likely first; empty unless requested."""
    finish_reason: str | None = None
    """Set in the last chunk: stop, length, abort or error."""
    version_spans: Sequence[VersionSpan] | None = None
    """In the last chunk: spans over all tokens of the completion."""
    routed_experts: str | None = None
    num_cached_tokens: int | None = None
    """In the last chunk: prompt tokens that the prefix cache held; None when not reported."""


class Sampler(Protocol):
    """Samples completions: a replica, or a route to one."""

    @property
    def url(self) -> str:
        """Its address, which is also its name in metrics."""

    def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Stream a completion; the last chunk has a finish reason.

        Raises:
            EngineUnreachable: when no connection can be opened; nothing was sampled then.
            EngineFailed: by cause, when the engine refuses, is too slow or breaks off.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a completion; its stream then ends with a last chunk."""


class Engine(Sampler, Protocol):
    """A replica that serves one policy."""

    async def weight_version(self) -> str:
        """The policy version that it serves.

        Raises:
            EngineUnreachable: when nothing answers at its address.
            EngineTimeout: when it does not answer in time.
            EngineFailed: by cause, when it is not healthy.
        """

    async def adapters(self) -> frozenset[str]:
        """Names of the LoRA adapters that it has loaded.

        Raises:
            EngineFailed: as `weight_version` does.
        """
