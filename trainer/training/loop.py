"""The update of one cycle: optimizer steps over a window, and when to stop. Torch-free."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onlinerl.errors import TrainingError
from onlinerl.trainer.backend.protocol import AdamParams, ForwardBackward, TrainingBackend
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.losses.spec import LossSpec
from onlinerl.trainer.rollouts.data import Datum, num_sampled
from onlinerl.trainer.rollouts.rows import RowKey
from onlinerl.trainer.training.diagnostics import ratio_metrics, stop_reason

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
OnStep = Callable[[int, dict[str, float]], None]
"""Called with the number of a step and its metrics."""


@dataclass(kw_only=True)
class History:
    """Metrics of the steps of a cycle."""

    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of every step that was taken, and of the step that stopped the cycle, if any."""
    stopped: str | None = None
    """Why the cycle ended before its last planned step."""
    num_planned: int = 0
    first_log_ratio: FloatArray = field(default_factory=lambda: np.empty(0))
    last_log_ratio: FloatArray = field(default_factory=lambda: np.empty(0))
    """Log-ratios of the tokens of the first and the last measured step."""


def train(
    backend: TrainingBackend,
    steps: Sequence[Sequence[Datum]],
    *,
    config: TrainerConfig,
    fresh: frozenset[RowKey],
    on_step: OnStep,
) -> History:
    """Take the steps in order, until the policy has moved too far from the rows.

    Each step is measured before it is taken. From the second step on, the cycle stops before a step
    whose k3 or effective share of tokens is out of bounds; the steps taken so far stay.

    Args:
        backend: Has the weights of the parent version.
        steps: Normalised batches.
        config: Loss, learning rate and bounds.
        fresh: Rows that the parent version itself served.
        on_step: Called for every measured step.

    Raises:
        TrainingError: the logged logprobs are not those of the parent version.
    """
    spec = LossSpec.from_config(config)
    history = History(num_planned=len(steps))
    for number, batch in enumerate(steps):
        result = backend.forward_backward(batch, loss=spec)
        log_ratio = np.concatenate(_log_ratios(batch, result))
        metrics = result.metrics | ratio_metrics(log_ratio) | {"tokens": float(len(log_ratio))}
        history.last_log_ratio = log_ratio
        if number == 0:
            history.first_log_ratio = log_ratio
            metrics |= _engine_gap(batch, result, fresh=fresh, bound=config.max_engine_gap)
        else:
            history.stopped = stop_reason(metrics, stop_k3=config.stop_k3, stop_ess=config.stop_ess)
        if history.stopped is None:
            params = _adam(config, step=number)
            metrics |= backend.optim_step(params) | {"learning_rate": params.learning_rate}
        history.steps.append(metrics)
        on_step(number, metrics)
        if history.stopped is not None:
            logger.warning("stopped early", extra={"step": number, "reason": history.stopped})
            break
    return history


def _adam(config: TrainerConfig, *, step: int) -> AdamParams:
    warmth = min(1.0, (step + 1) / (config.warmup_steps + 1))
    return AdamParams(
        learning_rate=config.learning_rate * warmth,
        weight_decay=config.weight_decay,
        grad_clip=config.grad_clip,
    )


def check_there_is_a_signal(steps: Sequence[Sequence[Datum]]) -> None:
    """Check that there is something to learn; call it before loading a model.

    Raises:
        TrainingError: there is no trainable token, or every advantage is 0.
    """
    data = [datum for batch in steps for datum in batch]
    if num_sampled(data) == 0:
        raise TrainingError("no trainable token in the window: nothing to learn from")
    if not any(datum.loss_fn_inputs.advantages[datum.loss_fn_inputs.mask].any() for datum in data):
        raise TrainingError("every advantage in the window is 0: its rewards say nothing")


def _log_ratios(batch: Sequence[Datum], result: ForwardBackward) -> list[FloatArray]:
    return [
        logprobs - datum.loss_fn_inputs.logprobs[datum.loss_fn_inputs.mask]
        for datum, logprobs in zip(batch, result.logprobs, strict=True)
    ]


def _engine_gap(
    batch: Sequence[Datum], result: ForwardBackward, *, fresh: frozenset[RowKey], bound: float
) -> dict[str, float]:
    """Mean |log r| of the rows that the parent version served, whose ratio must be 1.

    Raises:
        TrainingError: it is above `bound`.
    """
    gaps: list[FloatArray] = []
    for datum, log_ratio in zip(batch, _log_ratios(batch, result), strict=True):
        rows = datum.loss_fn_inputs.rows[datum.loss_fn_inputs.mask]
        numbers = [n for n, key in enumerate(datum.row_keys) if key in fresh]
        gaps.append(np.abs(log_ratio[np.isin(rows, numbers)]))
    tokens = np.concatenate(gaps)
    if len(tokens) == 0:
        return {}
    gap = float(tokens.mean())
    if gap > bound:
        raise TrainingError(
            f"rows that the parent version served have a mean |log r| of {gap:.3f} before the "
            f"first step, above trainer.max_engine_gap {bound:g}: the engine served other weights"
        )
    return {"engine_gap": gap}
