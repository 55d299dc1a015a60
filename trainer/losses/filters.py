"""Filters that leave whole rows out of the policy loss when the policy moved too far from them.

Shape suffixes as in `policy.py`: N = sampled tokens, R = rows. Filtered rows still count in the
denominator of the loss, so the other rows keep their weight.
"""

import torch
from torch import Tensor

from onlinerl.trainer.losses.policy import row_means
from onlinerl.trainer.losses.spec import LossSpec


def k3(log_ratio_N: Tensor) -> Tensor:
    """Per token r - log r - 1: a non-negative estimate of KL(mu || pi) (Schulman 2020)."""
    return log_ratio_N.exp() - log_ratio_N - 1


def keep_by_k3(log_ratio_N: Tensor, rows_N: Tensor, *, k3_max: float) -> Tensor:
    """keep_R: the mean k3 of the row is at most `k3_max` nats."""
    return row_means(k3(log_ratio_N), rows_N) <= k3_max


def keep_by_geometric_mean(log_ratio_N: Tensor, rows_N: Tensor, *, band: float) -> Tensor:
    """keep_R: exp(mean log r) of the row is within 1 +- `band`."""
    return (row_means(log_ratio_N, rows_N).exp() - 1).abs() <= band


def keep_by_veto(log_ratio_N: Tensor, rows_N: Tensor, *, veto_ratio: float) -> Tensor:
    """keep_R: no token of the row has a ratio below `veto_ratio`."""
    vetoed_N = (log_ratio_N.exp() < veto_ratio).to(log_ratio_N.dtype)
    return row_means(vetoed_N, rows_N) == 0


def rows_to_keep(spec: LossSpec, *, log_ratio_N: Tensor, rows_N: Tensor) -> Tensor:
    """keep_R: rows that pass every filter of `spec`."""
    log_ratio_N = log_ratio_N.detach()
    keep_R = torch.ones_like(row_means(log_ratio_N, rows_N), dtype=torch.bool)
    if "k3" in spec.filters:
        keep_R &= keep_by_k3(log_ratio_N, rows_N, k3_max=spec.k3_max)
    if "geometric" in spec.filters:
        keep_R &= keep_by_geometric_mean(log_ratio_N, rows_N, band=spec.geometric_band)
    if "veto" in spec.filters:
        keep_R &= keep_by_veto(log_ratio_N, rows_N, veto_ratio=spec.veto_ratio)
    return keep_R
