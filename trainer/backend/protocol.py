"""The four verbs that a cycle speaks to whatever computes gradients, and their in-memory twin.

They are the verbs of the Tinker training API, so a backend can be the local torch one, a service
on another machine, or somebody else's. Losses are sums over tokens; weights in the data make a
batch of one optimizer step sum to 1, so chunks of it add up to the whole.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onlinerl.trainer.losses.spec import LossSpec
from onlinerl.trainer.rollouts.data import Datum


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """One optimizer step."""

    learning_rate: float
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardBackward:
    """What a backward pass reports."""

    metrics: dict[str, float]
    """Weighted sums: `loss/policy`, `loss/kl`, `entropy`, `kl_base`, `masked_share`; KL is 0
    when no base is loaded."""
    logprobs: list[NDArray[np.float64]]
    """log pi of the masked positions, one array per datum, before the step."""


class TrainingBackend(Protocol):
    """Owns the weights, their gradients and the optimizer state.

    It lives for one cycle: the next one starts from served weights with a new optimizer.
    """

    def forward_backward(self, data: Sequence[Datum], *, loss: LossSpec) -> ForwardBackward:
        """Add the gradient of the summed loss to what is there."""
        ...

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Apply and clear the gradient; returns `grad_norm` before clipping."""
        ...

    def save_state(self, path: Path) -> None:
        """Write what a later backend needs to go on as this one would have."""
        ...

    def save_weights(self, path: Path) -> None:
        """Write the weights as a folder that an engine can serve."""
        ...


class MemoryBackend:
    """A TrainingBackend without a model: every step moves each logprob by `drift` along A."""

    def __init__(self, *, drift: float = 0.01) -> None:
        self.drift = drift
        self.steps: list[AdamParams] = []
        self.seen: list[list[str]] = []

    def forward_backward(self, data: Sequence[Datum], *, loss: LossSpec) -> ForwardBackward:
        """Logprobs are the logged ones, moved by the steps so far."""
        self.seen.append([datum.segment_id for datum in data])
        metrics = dict.fromkeys(("loss/policy", "loss/kl", "entropy", "kl_base"), 0.0)
        moved = [self._logprobs(datum) for datum in data]
        return ForwardBackward(metrics=metrics | {"masked_share": 0.0}, logprobs=moved)

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Remembered, nothing else."""
        self.steps.append(params)
        return {"grad_norm": 1.0}

    def save_state(self, path: Path) -> None:
        """The number of steps."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "state.json").write_text(json.dumps({"steps": len(self.steps)}), encoding="utf-8")

    def save_weights(self, path: Path) -> None:
        """A folder that has the files of a model and no model."""
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text("{}", encoding="utf-8")
        (path / "model.safetensors").write_bytes(repr((self.seen, self.steps)).encode())

    def _logprobs(self, datum: Datum) -> NDArray[np.float64]:
        inputs = datum.loss_fn_inputs
        sign = np.sign(inputs.advantages[inputs.mask]).astype(np.float64)
        return inputs.logprobs[inputs.mask] + self.drift * len(self.steps) * sign
