"""Measures of how far the policy in training is from the policy that served.

Pure functions of log-ratios log r = log pi - log mu of sampled tokens. Torch-free.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def ratio_metrics(log_ratio: FloatArray) -> dict[str, float]:
    """Means over all sampled tokens, including those that filters leave out of the loss.

    `ratio/k1` = mean(-log r), `ratio/k3` = mean(r - log r - 1), `ratio/chi2` = mean(r^2) - 1,
    `ratio/ess` = (sum r)^2 / (n sum r^2), `ratio/mean_abs` = mean |log r| and its largest and
    99.9th percentile.
    """
    ratio = np.exp(log_ratio)
    return {
        "ratio/k1": float(-log_ratio.mean()),
        "ratio/k3": float((ratio - log_ratio - 1).mean()),
        "ratio/chi2": float((ratio**2).mean() - 1),
        "ratio/ess": effective_share(ratio),
        "ratio/mean_abs": float(np.abs(log_ratio).mean()),
        "ratio/max_abs": float(np.abs(log_ratio).max()),
        "ratio/p999_abs": float(np.quantile(np.abs(log_ratio), 0.999)),
    }


def effective_share(weights: FloatArray) -> float:
    """ESS/n = (sum w)^2 / (n sum w^2), from 1/n to 1."""
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def stop_reason(metrics: Mapping[str, float], *, stop_k3: float, stop_ess: float) -> str | None:
    """Why no further step should be taken; None while the metrics are within their bounds."""
    if metrics["ratio/k3"] > stop_k3:
        return f"k3 {metrics['ratio/k3']:.4f} is above stop_k3 {stop_k3:g}"
    if metrics["ratio/ess"] < stop_ess:
        return f"ESS/n {metrics['ratio/ess']:.3f} is below stop_ess {stop_ess:g}"
    return None
