"""The data of a training backend: token sequences with the inputs of the loss per position.

Shapes: T = positions of one sequence. `model_input[t]` predicts `target_tokens[t]`, so everything
is already shifted by one. Torch-free: the cycle builds these without loading a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onlinerl.trainer.rollouts.rows import RowKey

NO_ROW = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class LossInputs:
    """Per-position inputs of the loss, all of length T; only values on the mask are read."""

    target_tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """True where the served policy sampled the target and this cycle learns from it."""
    logprobs: NDArray[np.float32]
    """log mu(target), natural log, of the distribution that was sampled from."""
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    """Share of the position in the loss; a batch that is one optimizer step sums to 1."""
    temperatures: NDArray[np.float32]
    """Logits are divided by this before the softmax, as they were when the target was sampled."""
    rows: NDArray[np.int32]
    """Number, from 0, of the completion that a position belongs to; NO_ROW outside completions."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Datum:
    """One training sequence: a segment that may hold several completions."""

    segment_id: str
    model_input: NDArray[np.int64]
    loss_fn_inputs: LossInputs
    row_keys: tuple[RowKey, ...] = ()
    """The completions, in the order in which `loss_fn_inputs.rows` numbers them."""

    @property
    def num_tokens(self) -> int:
        """Positions in the forward pass."""
        return len(self.model_input)

    @property
    def num_sampled(self) -> int:
        """Positions that are learned from."""
        return int(self.loss_fn_inputs.mask.sum())


def num_sampled(data: Sequence[Datum]) -> int:
    """Positions that are learned from, over all sequences."""
    return sum(datum.num_sampled for datum in data)
