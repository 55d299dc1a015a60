"""The verbs that a cycle calls to compute gradients, and an in-memory twin for tests.

They are the verbs of the Tinker training API, so a backend can be the local torch one, a service
on another machine, or somebody else's. Losses are sums over tokens: the weights of the data of one
optimizer step sum to 1, so that the losses of its chunks add up to the loss of the step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from onlinerl.trainer.losses.spec import LossSpec
from onlinerl.trainer.rollouts.data import Datum


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """Parameters of one optimizer step."""

    learning_rate: float
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardBackward:
    """Results of a backward pass."""

    metrics: dict[str, float]
    """Weighted sums: `loss/policy`, `loss/kl`, `entropy`, `kl_base`, `masked_share`; the KL is 0
    when no base model is loaded."""
    logprobs: list[NDArray[np.float64]]
    """log pi of the masked positions, one array per datum, before the step."""


class TrainingBackend(Protocol):
    """Owns the weights, their gradients and the optimizer state, for one cycle.

    The next cycle starts from served weights with a new optimizer.
    """

    def forward_backward(self, data: Sequence[Datum], *, loss: LossSpec) -> ForwardBackward:
        """Add the gradient of the summed loss to the gradient so far.

        Raises:
            TrainingError: no position of the data is learned from, or the loss is not finite.
        """
        ...

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Apply and clear the gradient; returns `grad_norm` before clipping.

        Raises:
            TrainingError: the gradient is not finite.
        """
        ...

    def save_state(self, path: Path) -> None:
        """Write weights and optimizer state, so that another backend can continue exactly here."""
        ...

    def save_weights(self, path: Path) -> None:
        """Write the weights as a folder that an engine can serve; created when missing."""
        ...


class MemoryBackend(TrainingBackend):
    """A TrainingBackend without a model: every step moves each logprob by `drift` along A.

    `seen` has the segment ids of each batch, `steps` the parameters of each optimizer step.
    """

    def __init__(self, *, drift: float = 0.01) -> None:
        self.drift = drift
        self.steps: list[AdamParams] = []
        self.seen: list[list[str]] = []

    @override
    def forward_backward(self, data: Sequence[Datum], *, loss: LossSpec) -> ForwardBackward:
        self.seen.append([datum.segment_id for datum in data])
        metrics = dict.fromkeys(("loss/policy", "loss/kl", "entropy", "kl_base"), 0.0)
        moved = [self._logprobs(datum) for datum in data]
        return ForwardBackward(metrics=metrics | {"masked_share": 0.0}, logprobs=moved)

    @override
    def optim_step(self, params: AdamParams) -> dict[str, float]:
        self.steps.append(params)
        return {"grad_norm": 1.0}

    @override
    def save_state(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "state.json").write_text(json.dumps({"steps": len(self.steps)}), encoding="utf-8")

    @override
    def save_weights(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text("{}", encoding="utf-8")
        (path / "model.safetensors").write_bytes(repr((self.seen, self.steps)).encode())

    def _logprobs(self, datum: Datum) -> NDArray[np.float64]:
        inputs = datum.loss_fn_inputs
        sign = np.sign(inputs.advantages[inputs.mask]).astype(np.float64)
        return inputs.logprobs[inputs.mask] + self.drift * len(self.steps) * sign
