"""How a window is cut into steps and forward passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.trainer.backend.batches import micro_batches, normalise, split_into_steps
from onlinerl.trainer.rollouts.data import num_sampled
from tests.trainer.builders import datum


def test_a_window_is_split_evenly_instead_of_leaving_a_small_rest() -> None:
    data = [datum(num_sampled=10, seed=n) for n in range(9)]

    steps = split_into_steps(data, tokens_per_step=40, epochs=1, seed=0)

    assert [num_sampled(step) for step in steps] == [40, 50]


def test_a_window_smaller_than_a_step_is_one_step() -> None:
    steps = split_into_steps([datum()], tokens_per_step=10_000, epochs=3, seed=0)

    assert [len(step) for step in steps] == [1, 1, 1]


def test_the_same_seed_gives_the_same_steps_and_another_seed_another_order() -> None:
    data = [datum(seed=n) for n in range(30)]

    def order(seed: int) -> list[list[str]]:
        steps = split_into_steps(data, tokens_per_step=40, epochs=2, seed=seed)
        return [[item.segment_id for item in step] for step in steps]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_weights_of_a_step_sum_to_one_and_keep_their_proportions() -> None:
    step = normalise([datum(num_sampled=2, weight=1.0), datum(num_sampled=4, weight=0.5)])
    first, second = (item.loss_fn_inputs for item in step)

    assert first.weights[first.mask].tolist() == pytest.approx([0.25, 0.25])
    assert second.weights[second.mask].tolist() == pytest.approx([0.125] * 4)


def test_micro_batches_count_their_padding() -> None:
    lengths = [10, 4, 4, 3]
    data = [datum(num_prompt=1, num_sampled=length) for length in lengths]

    # 10 alone; then 4 + 4 padded to 8; 3 would make it 12.
    assert micro_batches(data, max_tokens=11) == [[0], [1, 2], [3]]


def test_a_sequence_longer_than_a_micro_batch_is_on_its_own() -> None:
    data = [datum(num_prompt=1, num_sampled=50), datum(num_prompt=1, num_sampled=2)]

    assert micro_batches(data, max_tokens=16) == [[0], [1]]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    tokens_per_step=st.integers(1, 300),
    epochs=st.integers(1, 3),
)
def test_every_row_is_in_one_step_of_every_epoch(
    lengths: list[int], tokens_per_step: int, epochs: int
) -> None:
    data = [datum(num_sampled=length, seed=n) for n, length in enumerate(lengths)]

    steps = split_into_steps(data, tokens_per_step=tokens_per_step, epochs=epochs, seed=3)

    seen = sorted(item.segment_id for step in steps for item in step)
    assert seen == sorted([item.segment_id for item in data] * epochs)
    assert all(steps)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(16, 120))
def test_micro_batches_hold_every_row_once_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    data = [datum(num_prompt=1, num_sampled=length) for length in lengths]

    groups = micro_batches(data, max_tokens=budget)

    assert sorted(index for group in groups for index in group) == list(range(len(data)))
    for group in groups:
        size = max(data[index].num_tokens for index in group) * len(group)
        assert size <= budget or len(group) == 1
