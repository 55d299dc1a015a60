# ruff: noqa: N815 - tensors carry shape suffixes
"""Logprobs of sampled tokens and exact KL to the base, without keeping all logits at once.

Shape suffixes: N = sampled positions, D = hidden width, V = vocabulary. A position's logits exist
only while its chunk is computed; the backward pass computes them again. For SmolLM2 the logits of
4,000 positions take 800 MB, and several copies of them would be needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 1 << 24
"""Bound on N x V of a chunk: 64 MB in float32."""

Head = Callable[[Tensor], Tensor]
"""hidden_ND -> logits_NV."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenScores:
    """Scores of each sampled position, float32, in nats."""

    logprobs_N: Tensor
    """log pi(target) at the temperature of the row."""
    kl_N: Tensor
    """KL(pi || base) over the whole vocabulary at that temperature; 0 without a base."""
    entropy_N: Tensor
    """Entropy of pi at that temperature, without gradient."""


def score_tokens(
    hidden_ND: Tensor,
    *,
    head: Head,
    targets_N: Tensor,
    temperatures_N: Tensor,
    base_hidden_ND: Tensor | None = None,
    base_head: Head | None = None,
    vocabulary: int,
) -> TokenScores:
    """Score every position, a chunk at a time.

    The KL is summed over the vocabulary instead of estimated from the sampled token: it has the
    same expectation without the sampling noise, and its gradient is that of KL(pi || base).

    Args:
        hidden_ND: Last hidden states of the policy.
        head: The policy's output layer.
        targets_N: The sampled tokens.
        temperatures_N: Temperature that each token was sampled at.
        base_hidden_ND: Last hidden states of the base model; None leaves the KL at 0.
        base_head: The base model's output layer.
        vocabulary: Tokens in it; decides how many positions a chunk has.
    """
    size = max(1, LOGITS_PER_CHUNK // vocabulary)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, len(targets_N), size):
        place = slice(start, start + size)
        base_N = None if base_hidden_ND is None else base_hidden_ND[place]
        parts.append(
            checkpoint(
                partial(_score_chunk, head=head, base_head=base_head),
                hidden_ND[place],
                targets_N[place],
                temperatures_N[place],
                base_N,
                use_reentrant=False,
            )
        )
    logprobs, kls, entropies = zip(*parts, strict=True)
    return TokenScores(
        logprobs_N=torch.cat(logprobs), kl_N=torch.cat(kls), entropy_N=torch.cat(entropies)
    )


def _score_chunk(
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    base_hidden_ND: Tensor | None,
    *,
    head: Head,
    base_head: Head | None,
) -> tuple[Tensor, Tensor, Tensor]:
    log_pi_NV = _log_softmax(head(hidden_ND), temperatures_N)
    logprobs_N = log_pi_NV.gather(1, targets_N[:, None]).squeeze(1)
    detached_NV = log_pi_NV.detach()
    entropy_N = -(detached_NV.exp() * detached_NV).sum(1)
    if base_hidden_ND is None or base_head is None:
        return logprobs_N, torch.zeros_like(entropy_N), entropy_N
    with torch.no_grad():
        log_base_NV = _log_softmax(base_head(base_hidden_ND), temperatures_N)
    kl_N = (log_pi_NV.exp() * (log_pi_NV - log_base_NV)).sum(1)
    return logprobs_N, kl_N, entropy_N


def _log_softmax(logits_NV: Tensor, temperatures_N: Tensor) -> Tensor:
    return torch.log_softmax(logits_NV.float() / temperatures_N[:, None], dim=1)
