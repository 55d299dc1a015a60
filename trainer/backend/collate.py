# ruff: noqa: N815 - tensors carry shape suffixes
"""Sequences of different lengths as the tensors of one forward pass.

Shape suffixes: B = sequences, T = positions (right-padded), N = sampled positions, end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onlinerl.trainer.rollouts.data import Datum


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """A padded micro-batch. Tensors of shape N hold the sampled positions only."""

    tokens_BT: Tensor
    mask_BT: Tensor
    targets_N: Tensor
    behavior_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    temperatures_N: Tensor
    rows_N: Tensor

    @classmethod
    def of(cls, chunk: Sequence[Datum], *, device: torch.device) -> Self:
        """Pad on the right with token 0, and select the sampled positions."""
        length = max(datum.num_tokens for datum in chunk)
        tokens_BT = np.zeros((len(chunk), length), dtype=np.int64)
        mask_BT = np.zeros((len(chunk), length), dtype=np.bool_)
        for number, datum in enumerate(chunk):
            tokens_BT[number, : datum.num_tokens] = datum.model_input
            mask_BT[number, : datum.num_tokens] = datum.loss_fn_inputs.mask
        selected = {
            name: np.concatenate(
                [getattr(d.loss_fn_inputs, name)[d.loss_fn_inputs.mask] for d in chunk]
            )
            for name in ("target_tokens", "logprobs", "advantages", "weights", "temperatures")
        }
        tensors = {name: torch.from_numpy(value).to(device) for name, value in selected.items()}
        return cls(
            tokens_BT=torch.from_numpy(tokens_BT).to(device),
            mask_BT=torch.from_numpy(mask_BT).to(device),
            targets_N=tensors["target_tokens"],
            behavior_N=tensors["logprobs"],
            advantages_N=tensors["advantages"],
            weights_N=tensors["weights"],
            temperatures_N=tensors["temperatures"],
            rows_N=torch.from_numpy(_number_rows(chunk)).to(device),
        )


def _number_rows(chunk: Sequence[Datum]) -> NDArray[np.int64]:
    """Number the rows of a micro-batch from 0, over all its sequences."""
    numbers: list[NDArray[np.int64]] = []
    first = 0
    for datum in chunk:
        rows = datum.loss_fn_inputs.rows[datum.loss_fn_inputs.mask].astype(np.int64)
        _, dense = np.unique(rows, return_inverse=True)
        numbers.append(dense + first)
        first += int(dense.max(initial=-1)) + 1
    return np.concatenate(numbers)


def split_by_sequence(values_N: Tensor, *, mask_BT: Tensor) -> list[NDArray[np.float64]]:
    """Split values of the sampled positions into one array for each sequence."""
    counts = mask_BT.sum(1).tolist()
    return [part.double().cpu().numpy() for part in values_N.split(counts)]
