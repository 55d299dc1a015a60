"""Policy-gradient losses on logged tokens, corrected for the age of the policy that served them.

Shape suffixes: N = sampled tokens of a batch, laid end to end (no prompt, no padding: a token that
was not sampled has no ratio), R = rows, i.e. completions. `rows_N` is the row of each token.
Every function returns one loss per token, which the caller weights and sums, and whether the token
has a gradient. Pure functions of tensors: no configuration objects, no devices, no logging.

pi is the policy in training (its logprobs carry the gradient), mu the one that served,
r = exp(log pi - log mu), A the advantage, sg the stop-gradient.
"""

import torch
from torch import Tensor

from onlinerl.trainer.losses.spec import LossSpec

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this, so that exp stays finite in float32."""

DPPO_MAX_GAP = 0.2  # prime-rl's default for both signs
DPPO_PULL = 1e-3

Terms = tuple[Tensor, Tensor]
"""loss_N, and used_N (bool): whether the token has a gradient."""


def log_ratio(logprobs_N: Tensor, behavior_N: Tensor) -> Tensor:
    """Clamped log r; carries the gradient of `logprobs_N` inside the bound."""
    return (logprobs_N - behavior_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_sampling(log_ratio_N: Tensor, advantages_N: Tensor) -> Terms:
    """-r A: unbiased, with unbounded variance."""
    return -log_ratio_N.exp() * advantages_N, _all_used(log_ratio_N)


def tis(logprobs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, *, cap: float) -> Terms:
    """-sg(min(r, cap)) A log pi: truncated importance sampling (Ionides 2008; Yao et al. 2025)."""
    weight_N = log_ratio_N.detach().exp().clamp(max=cap)
    return -weight_N * advantages_N * logprobs_N, _all_used(log_ratio_N)


def icepop(
    logprobs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, *, low: float, high: float
) -> Terms:
    """-sg(r) A log pi where low <= r <= high, else 0 (arXiv 2510.18855)."""
    ratio_N = log_ratio_N.detach().exp()
    used_N = (ratio_N >= low) & (ratio_N <= high)
    weight_N = torch.where(used_N, ratio_N, torch.zeros_like(ratio_N))
    return -weight_N * advantages_N * logprobs_N, used_N


def ppo(log_ratio_N: Tensor, advantages_N: Tensor, *, low: float, high: float) -> Terms:
    """-min(r A, clip(r, low, high) A) (arXiv 1707.06347, eq. 7)."""
    return _clipped(log_ratio_N.exp(), advantages_N, low=low, high=high)


def cispo(
    logprobs_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, *, low: float, high: float
) -> Terms:
    """-sg(clip(r, low, high)) A log pi: every token keeps a gradient (arXiv 2506.13585, eq. 4)."""
    weight_N = log_ratio_N.detach().exp().clamp(low, high)
    return -weight_N * advantages_N * logprobs_N, _all_used(log_ratio_N)


def gspo(
    log_ratio_N: Tensor, advantages_N: Tensor, rows_N: Tensor, *, low: float, high: float
) -> Terms:
    """PPO's clip on the ratio of the whole row, s = exp(mean log r) (arXiv 2507.18071, eq. 5).

    Departure: a row's term is repeated for each of its tokens, so that, as with the other losses,
    a row weighs in proportion to its tokens; the paper weighs rows equally.
    """
    ratio_R = row_means(log_ratio_N, rows_N).exp()
    return _clipped(ratio_R[rows_N], advantages_N, low=low, high=high)


def dppo(
    logprobs_N: Tensor, behavior_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor
) -> Terms:
    """Drop tokens whose probability moved 0.2 in their advantage's direction (arXiv 2602.04879).

    The other tokens weigh sg(r) A; 1e-3 (log r)^2 is added for every token, as in prime-rl.
    """
    gap_N = logprobs_N.detach().exp() - behavior_N.exp()
    gone_N = ((advantages_N > 0) & (gap_N > DPPO_MAX_GAP)) | (
        (advantages_N < 0) & (gap_N < -DPPO_MAX_GAP)
    )
    weight_N = log_ratio_N.detach().exp().masked_fill(gone_N, 0.0)
    return -weight_N * advantages_N * logprobs_N + DPPO_PULL * log_ratio_N.square(), ~gone_N


def policy_terms(
    spec: LossSpec,
    *,
    logprobs_N: Tensor,
    behavior_N: Tensor,
    advantages_N: Tensor,
    rows_N: Tensor,
) -> Terms:
    """Per-token terms of the loss `spec.name`, before row filters and weights."""
    log_r_N = log_ratio(logprobs_N, behavior_N)
    low, high = spec.ratio_low, spec.ratio_high
    match spec.name:
        case "importance_sampling":
            return importance_sampling(log_r_N, advantages_N)
        case "tis":
            return tis(logprobs_N, log_r_N, advantages_N, cap=spec.ratio_cap)
        case "icepop":
            return icepop(logprobs_N, log_r_N, advantages_N, low=low, high=high)
        case "ppo":
            return ppo(log_r_N, advantages_N, low=low, high=high)
        case "cispo":
            return cispo(logprobs_N, log_r_N, advantages_N, low=low, high=high)
        case "gspo":
            return gspo(log_r_N, advantages_N, rows_N, low=low, high=high)
        case "dppo":
            return dppo(logprobs_N, behavior_N, log_r_N, advantages_N)


def row_means(values_N: Tensor, rows_N: Tensor) -> Tensor:
    """Mean of a per-token value over each row, shape R. Rows are numbered from 0 without gaps."""
    num_rows = int(rows_N.max()) + 1 if len(rows_N) else 0
    zeros_R = values_N.new_zeros(num_rows)
    sums_R = zeros_R.index_add(0, rows_N, values_N)
    counts_R = zeros_R.index_add(0, rows_N, torch.ones_like(values_N))
    return sums_R / counts_R


def _clipped(ratio_N: Tensor, advantages_N: Tensor, *, low: float, high: float) -> Terms:
    free_N = ratio_N * advantages_N
    bound_N = ratio_N.clamp(low, high) * advantages_N
    return -torch.minimum(free_N, bound_N), free_N <= bound_N


def _all_used(log_ratio_N: Tensor) -> Tensor:
    return torch.ones_like(log_ratio_N, dtype=torch.bool)
