"""Padding, and which token belongs to which row."""

import numpy as np
import pytest
import torch

from onlinerl.trainer.backend.collate import Batch, split_by_sequence
from tests.trainer.builders import datum

CPU = torch.device("cpu")


def test_rows_of_different_sequences_keep_different_numbers() -> None:
    batch = Batch.of([datum(3, 2, seed=1), datum(1, 3, seed=2)], device=CPU)

    assert batch.rows_N.tolist() == [0, 0, 1, 1, 1]


def test_only_sampled_positions_are_picked() -> None:
    first, second = datum(3, 2, seed=1, advantage=0.5), datum(1, 3, seed=2, advantage=-1.0)
    batch = Batch.of([first, second], device=CPU)

    assert batch.tokens_BT.shape == (2, 4)
    assert batch.mask_BT.tolist() == [[False, False, True, True], [True, True, True, False]]
    assert batch.advantages_N.tolist() == [0.5, 0.5, -1.0, -1.0, -1.0]
    assert batch.targets_N[:2].tolist() == first.loss_fn_inputs.target_tokens[2:].tolist()
    assert torch.isfinite(batch.behavior_N).all()


def test_per_token_values_go_back_to_their_sequences() -> None:
    mask = torch.tensor([[False, True], [True, True]])
    first, second = split_by_sequence(torch.tensor([1.0, 2.0, 3.0]), mask_BT=mask)

    assert np.array_equal(first, [1.0])
    assert second == pytest.approx([2.0, 3.0])
