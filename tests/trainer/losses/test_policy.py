"""Every loss against numbers worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.trainer.losses.policy import LOG_RATIO_BOUND, policy_terms, row_means
from onlinerl.trainer.losses.spec import LossSpec

LN2 = math.log(2.0)


def loss(
    name: str,
    logprobs: list[float],
    behavior: list[float],
    *,
    advantages: list[float],
    rows: list[int] | None = None,
    **bounds: float,
) -> tuple[list[float], list[float], list[bool]]:
    """Loss per token, gradient of their sum, and which tokens are in use."""
    logprobs_N = torch.tensor(logprobs, requires_grad=True)
    terms_N, used_N = policy_terms(
        LossSpec(name=name, **bounds),  # type: ignore[arg-type]
        logprobs_N=logprobs_N,
        behavior_N=torch.tensor(behavior),
        advantages_N=torch.tensor(advantages),
        rows_N=torch.tensor(rows or [0] * len(logprobs)),
    )
    terms_N.sum().backward()
    assert logprobs_N.grad is not None
    return terms_N.tolist(), logprobs_N.grad.tolist(), used_N.tolist()


@pytest.mark.parametrize("name", ["importance_sampling", "tis", "icepop", "ppo", "cispo"])
def test_on_policy_every_gradient_is_that_of_reinforce(name: str) -> None:
    logprobs = [-1.0, -3.0]
    _, gradient, used = loss(
        name, logprobs, logprobs, advantages=[0.5, -2.0], ratio_low=0.5, ratio_high=2.0
    )

    assert gradient == pytest.approx([-0.5, 2.0])
    assert used == [True, True]


def test_importance_sampling_weighs_by_the_ratio_without_a_bound() -> None:
    # r = e^2: loss -r A = -e^2 * 0.5, gradient the same since dr/dlogp = r.
    terms, gradient, _ = loss("importance_sampling", [-1.0], [-3.0], advantages=[0.5])

    assert terms == pytest.approx([-0.5 * math.e**2])
    assert gradient == pytest.approx([-0.5 * math.e**2])


@pytest.mark.parametrize(
    ("behavior", "weight"),
    [(-1.0 - math.log(1.5), 1.5), (-1.0 - math.log(8.0), 2.0), (-1.0 + math.log(4.0), 0.25)],
    ids=["below the cap", "capped", "no lower bound"],
)
def test_tis_caps_the_ratio_from_above_only(behavior: float, weight: float) -> None:
    terms, gradient, _ = loss("tis", [-1.0], [behavior], advantages=[1.0], ratio_cap=2.0)

    assert terms == pytest.approx([weight * 1.0])
    assert gradient == pytest.approx([-weight])


@pytest.mark.parametrize(
    ("ratio", "weight"),
    [(0.4, 0.0), (0.5001, 0.5001), (1.0, 1.0), (4.99, 4.99), (5.1, 0.0)],
)
def test_icepop_zeroes_what_is_outside_its_band(ratio: float, weight: float) -> None:
    _, gradient, used = loss(
        "icepop", [-1.0], [-1.0 - math.log(ratio)], advantages=[2.0], ratio_low=0.5, ratio_high=5.0
    )

    assert gradient == pytest.approx([-2.0 * weight], rel=1e-5)
    assert used == [weight > 0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.2, 0.0),  # already moved with A: clipped
        (1.5, -1.0, 1.5, 1.5),  # moved against A: full gradient back
        (0.5, -1.0, 0.8, 0.0),
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_ppo_clips_only_what_moved_its_own_way(
    ratio: float, advantage: float, value: float, slope: float
) -> None:
    terms, gradient, used = loss(
        "ppo",
        [-2.0],
        [-2.0 - math.log(ratio)],
        advantages=[advantage],
        ratio_low=0.8,
        ratio_high=1.2,
    )

    assert terms == pytest.approx([value])
    assert gradient == pytest.approx([slope], abs=1e-6)
    assert used == [slope != 0]


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    _, gradient, used = loss(
        "cispo",
        [-1.0, -1.0],
        [-1.0 - math.log(9.0), -1.0 - LN2],
        advantages=[1.0, 1.0],
        ratio_low=0.0,
        ratio_high=4.0,
    )

    assert gradient == pytest.approx([-4.0, -2.0])
    assert used == [True, True]


def test_gspo_takes_the_geometric_mean_of_the_row() -> None:
    # Row 0: log r = 0.4, 0.0 -> s = e^0.2; row 1: log r = -0.1 -> s = e^-0.1.
    terms, gradient, _ = loss(
        "gspo",
        [-1.0, -1.0, -1.1],
        [-1.4, -1.0, -1.0],
        advantages=[1.0, 1.0, 2.0],
        rows=[0, 0, 1],
        ratio_low=0.5,
        ratio_high=2.0,
    )

    s0, s1 = math.exp(0.2), math.exp(-0.1)
    assert terms == pytest.approx([-s0, -s0, -2 * s1])
    # d(-2 s0)/dlogp = -2 s0 / 2 for each token of the row.
    assert gradient == pytest.approx([-s0, -s0, -2 * s1])


def test_gspo_drops_a_row_whose_ratio_left_the_clip() -> None:
    _, gradient, used = loss(
        "gspo",
        [-1.0, -1.0],
        [-1.5, -1.5],
        advantages=[1.0, 1.0],
        ratio_low=0.9997,
        ratio_high=1.0004,
    )

    assert gradient == [0.0, 0.0]
    assert used == [False, False]


@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "is_used"),
    [
        (0.75, 0.5, 1.0, False),
        (0.75, 0.5, -1.0, True),
        (0.25, 0.5, -1.0, False),
        (0.65, 0.5, 1, True),
    ],
)
def test_dppo_drops_tokens_whose_probability_moved_by_a_fifth(
    pi: float, mu: float, advantage: float, is_used: bool
) -> None:
    _, gradient, used = loss("dppo", [math.log(pi)], [math.log(mu)], advantages=[advantage])

    ratio = pi / mu
    pull = 2e-3 * math.log(ratio)
    assert used == [is_used]
    assert gradient == pytest.approx([-ratio * advantage * is_used + pull], rel=1e-5)


def test_a_far_ratio_is_clamped_and_stays_finite() -> None:
    terms, gradient, _ = loss("importance_sampling", [-1.0], [-90.0], advantages=[1.0])

    assert terms == pytest.approx([-math.exp(LOG_RATIO_BOUND)])
    assert gradient == [0.0]


def test_row_means_are_over_each_rows_own_tokens() -> None:
    means = row_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]))

    assert means.tolist() == [2.0, 5.0]


def test_an_empty_batch_has_no_rows() -> None:
    assert row_means(torch.empty(0), torch.empty(0, dtype=torch.int64)).tolist() == []


@given(
    log_ratios=st.lists(st.floats(-3, 3), min_size=1, max_size=20),
    name=st.sampled_from(["importance_sampling", "tis", "icepop", "ppo", "cispo", "gspo", "dppo"]),
)
def test_a_zero_advantage_gives_no_policy_gradient(log_ratios: list[float], name: str) -> None:
    _, gradient, _ = loss(
        name,
        [-1.0] * len(log_ratios),
        [-1.0 - x for x in log_ratios],
        advantages=[0.0] * len(log_ratios),
    )
    pull = [2e-3 * x if name == "dppo" else 0.0 for x in log_ratios]

    assert gradient == pytest.approx(pull, abs=1e-5)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=12), st.randoms())
def test_the_order_of_tokens_does_not_matter(log_ratios: list[float], random: object) -> None:
    order = list(range(len(log_ratios)))
    random.shuffle(order)  # type: ignore[attr-defined]
    behavior = [-1.0 - x for x in log_ratios]
    advantages = [float(i % 3 - 1) for i in range(len(log_ratios))]

    _, plain, _ = loss("tis", [-1.0] * len(order), behavior, advantages=advantages)
    _, mixed, _ = loss(
        "tis",
        [-1.0] * len(order),
        [behavior[i] for i in order],
        advantages=[advantages[i] for i in order],
    )

    assert mixed == pytest.approx([plain[i] for i in order])
