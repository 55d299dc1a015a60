"""What the gateway asks of an engine: token ids in, token ids with log-probabilities out.

`Engine` is the seam: `http_engine` speaks to a vLLM replica, `MemoryEngine` is its twin. Which
engine is asked, and what happens when it fails, is decided in `router` and `route`.
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
    """vLLM's SamplingParams; log-probabilities are always asked for."""
    cache_salt: str = ""
    """Prefixes are only shared between requests of equal salt; the route sets it."""
    adapter: str | None = None
    """LoRA adapter that answers, `assistant@12`; None asks the weights of the replica."""
    top_logprobs: int = 0
    """Most likely tokens to tell at every place; 0 tells none."""
    streamed: bool = True
    """Whether chunks are wanted as they are sampled. Whole, they come when the last token has: that
    costs the engine and the gateway a tenth, and an engine that dies has served nothing yet."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent along, e.g. the context of a trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a place."""

    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What an engine sent at once."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """One per token, or fewer where the engine gave none; NaN where it gave no number."""
    top_logprobs: Sequence[Sequence[TopLogprob]] = ()
    """One list per token, the most likely first; empty unless asked for."""
    finish_reason: str | None = None
    """Set in the last chunk: stop, length, abort or error."""
    version_spans: Sequence[VersionSpan] | None = None
    """In the last chunk: spans over all tokens of the completion."""
    routed_experts: str | None = None
    num_cached_tokens: int | None = None
    """In the last chunk: prompt tokens that the prefix cache held; None when it is not told."""


class Sampler(Protocol):
    """What samples completions: a replica, or a route that leads to one."""

    @property
    def url(self) -> str:
        """Its address; also its name in metrics."""

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
