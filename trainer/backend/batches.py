"""Splits a window into optimizer steps, and a step into forward passes. Torch-free."""

import random
from collections.abc import Sequence
from dataclasses import replace

from onlinerl.trainer.rollouts.data import Datum, num_sampled


def split_into_steps(
    data: Sequence[Datum], *, tokens_per_step: int, epochs: int, seed: int
) -> list[list[Datum]]:
    """Batches of about `tokens_per_step` sampled tokens, in an order that depends on `seed`.

    All steps have nearly the same size: a small last step would be noise at the same learning rate.

    Args:
        data: The window.
        tokens_per_step: Sampled tokens of a step, about.
        epochs: Passes over the window; each has an order of its own.
        seed: Of the order.
    """
    num_steps = max(1, round(num_sampled(data) / tokens_per_step))
    order = random.Random(seed)
    steps: list[list[Datum]] = []
    for _ in range(epochs):
        shuffled = order.sample(list(data), len(data))
        steps += [normalise(batch) for batch in _even_batches(shuffled, num_batches=num_steps)]
    return steps


def normalise(batch: Sequence[Datum]) -> list[Datum]:
    """Scale the weights of a batch so that they sum to 1 over its sampled tokens."""
    total = sum(
        float(datum.loss_fn_inputs.weights[datum.loss_fn_inputs.mask].sum(dtype="float64"))
        for datum in batch
    )
    return [_scale(datum, factor=1 / total) for datum in batch]


def micro_batches(data: Sequence[Datum], *, max_tokens: int) -> list[list[int]]:
    """Group sequences of similar length; a group has at most `max_tokens` tokens with padding.

    A sequence that is longer than `max_tokens` gets a group of its own.

    Returns:
        Indices of `data` for each group, longest sequences first.
    """
    by_length = sorted(range(len(data)), key=lambda index: (-data[index].num_tokens, index))
    groups: list[list[int]] = []
    longest = 0
    for index in by_length:
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = data[index].num_tokens
    return groups


def _even_batches(data: Sequence[Datum], *, num_batches: int) -> list[list[Datum]]:
    """Split `data`, in order, into batches of about the same number of sampled tokens."""
    batches: list[list[Datum]] = [[] for _ in range(num_batches)]
    total, done = num_sampled(data), 0
    for datum in data:
        middle = done + datum.num_sampled / 2
        batches[min(int(middle / total * num_batches), num_batches - 1)].append(datum)
        done += datum.num_sampled
    return [batch for batch in batches if batch]


def _scale(datum: Datum, *, factor: float) -> Datum:
    inputs = datum.loss_fn_inputs
    weights = (inputs.weights * factor).astype("float32")
    return replace(datum, loss_fn_inputs=replace(inputs, weights=weights))
