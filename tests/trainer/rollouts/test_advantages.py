"""Baselines and whitening, worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onlinerl.trainer.rollouts.advantages import (
    compute_advantages,
    group_baselines,
    session_weights,
    track_baselines,
    whiten,
)
from tests.trainer.builders import row, rows_with


def test_a_tenants_mean_is_taken_before_its_own_session_enters_it() -> None:
    before, after = track_baselines(rows_with([1.0, -1.0, 1.0]), baselines={"acme": 0.5}, decay=0.9)

    assert before[("acme", "s0000")] == 0.5
    assert before[("acme", "s0001")] == pytest.approx(0.9 * 0.5 + 0.1 * 1.0)
    assert before[("acme", "s0002")] == pytest.approx(0.9 * 0.55 + 0.1 * -1.0)
    assert after["acme"] == pytest.approx(0.9 * 0.395 + 0.1 * 1.0)


def test_every_session_of_a_new_tenant_is_compared_with_its_others() -> None:
    before, after = track_baselines(rows_with([1.0, 0.0, -0.5]), baselines={}, decay=0.9)

    assert before == {
        ("acme", "s0000"): pytest.approx(-0.25),
        ("acme", "s0001"): pytest.approx(0.25),
        ("acme", "s0002"): pytest.approx(0.5),
    }
    assert after == {"acme": pytest.approx(0.5 / 3)}


def test_tenants_do_not_share_a_baseline() -> None:
    rows = [row(0, reward=1.0), row(1, reward=-1.0, tenant="other")]
    before, after = track_baselines(rows, baselines={"acme": 0.5, "idle": 0.1}, decay=0.5)

    assert before == {("acme", "s0000"): 0.5, ("other", "s0001"): 0.0}
    assert after == {"acme": 0.75, "idle": 0.1, "other": -1.0}


def test_tenants_that_chose_the_same_session_id_do_not_share_a_session() -> None:
    rows = [
        row(0, session_id="s", reward=1.0),
        row(1, session_id="s", reward=-1.0, tenant="other"),
        row(2, session_id="s", reward=-1.0, tenant="other"),
    ]
    found = compute_advantages(rows, baselines={"acme": 0.5, "other": 0.0}, decay=0.5)

    assert found.weights == {("i0000", 0): 1.0, ("i0001", 0): 0.5, ("i0002", 0): 0.5}
    assert found.baselines == {"acme": 0.75, "other": -0.5}
    # Raw 0.5 and -1 of weight 1 each: mean -0.25, deviation 0.75.
    assert list(found.values.values()) == pytest.approx([1.0, -1.0, -1.0])


def test_tenants_that_chose_the_same_task_do_not_share_a_group() -> None:
    rows = [row(0, task="refund"), row(1, task="refund", tenant="other")]

    assert group_baselines(rows) == {}


def test_equal_rewards_are_not_told_apart_by_a_baseline_that_moves() -> None:
    found = compute_advantages(rows_with([1.0] * 3), baselines={"acme": 0.0}, decay=0.9)

    assert list(found.values.values()) == pytest.approx([1.0, 0.9, 0.81])


def test_one_sample_per_prompt_has_an_advantage() -> None:
    found = compute_advantages(rows_with([1.0, -1.0, -1.0]), baselines={}, decay=0.95)

    assert all(value != 0 for value in found.values.values())
    assert found.values[("i0000", 0)] > 0 > found.values[("i0001", 0)]


def test_a_window_of_a_single_row_has_an_advantage() -> None:
    found = compute_advantages([row(reward=-1.0)], baselines={}, decay=0.95)

    assert found.values == {("i0000", 0): -1.0}


def test_completions_of_one_prompt_are_compared_with_each_other() -> None:
    rows = [row(0, choice_index=n, reward=reward) for n, reward in enumerate([1.0, 0.0, -1.0])]

    assert group_baselines(rows) == {
        ("i0000", 0): pytest.approx(-0.5),
        ("i0000", 1): pytest.approx(0.0),
        ("i0000", 2): pytest.approx(0.5),
    }


def test_a_task_is_compared_over_sessions_of_any_number_of_rows() -> None:
    # Session s has three rows of mean 0, session t one of reward 1: each is the other's baseline.
    rows = [
        *(row(n, session_id="s", task="refund", reward=r) for n, r in enumerate([1.0, 0.0, -1.0])),
        row(3, session_id="t", task="refund", reward=1.0),
        row(4, session_id="u", task="refund", reward=-1.0),
        row(5, session_id="v", task="other", reward=-1.0),
    ]

    found = group_baselines(rows)

    assert found[("i0000", 0)] == found[("i0002", 0)] == pytest.approx((1.0 - 1.0) / 2)
    assert found[("i0003", 0)] == pytest.approx((0.0 - 1.0) / 2)
    assert ("i0005", 0) not in found


def test_a_session_weighs_the_same_however_many_rows_it_has() -> None:
    rows = [row(n, session_id="s") for n in range(4)] + [row(4)]
    weights = session_weights(rows)

    assert [weights[item.key] for item in rows] == [0.25, 0.25, 0.25, 0.25, 1.0]


def test_a_session_of_many_rows_moves_the_baseline_once() -> None:
    many = [row(n, session_id="s", reward=1.0) for n in range(4)]
    _, after = track_baselines(many, baselines={"acme": 0.0}, decay=0.9)

    assert after["acme"] == pytest.approx(0.1)


def test_a_row_of_a_capped_user_weighs_less() -> None:
    rows = [row(0, session_id="s"), row(1, session_id="s", weight=0.25)]

    assert session_weights(rows) == {("i0000", 0): 0.5, ("i0001", 0): 0.125}


def test_whitening_uses_the_weights() -> None:
    # Weighted mean (3*0 + 1*4)/4 = 1, variance (3*1 + 1*9)/4 = 3.
    values = {("a", 0): 0.0, ("b", 0): 4.0}
    found = whiten(values, weights={("a", 0): 3.0, ("b", 0): 1.0})

    assert found == {
        ("a", 0): pytest.approx(-1 / math.sqrt(3)),
        ("b", 0): pytest.approx(3 / math.sqrt(3)),
    }


def test_values_without_a_spread_are_not_scaled() -> None:
    values = {("a", 0): 0.5, ("b", 0): 0.5}

    assert whiten(values, weights=dict.fromkeys(values, 1.0)) == values


rewards = st.lists(st.floats(-1, 1), min_size=2, max_size=30)


@given(rewards, st.integers(1, 4))
def test_whitened_advantages_have_weighted_mean_zero_and_deviation_one(
    values: list[float], per_session: int
) -> None:
    rows = [row(n, session_id=f"s{n // per_session}", reward=r) for n, r in enumerate(values)]
    found = compute_advantages(rows, baselines={"acme": 0.1}, decay=0.9)

    total = sum(found.weights.values())
    mean = sum(found.weights[key] * value for key, value in found.values.items()) / total
    square = sum(found.weights[key] * value**2 for key, value in found.values.items()) / total
    spreads = [max(every) - min(every) for every in (values, found.values.values())]
    if min(spreads) > 1e-3:
        assert mean == pytest.approx(0, abs=1e-6)
        assert square == pytest.approx(1, rel=1e-6)


@given(rewards, st.randoms())
def test_the_order_in_which_rows_arrive_does_not_matter(
    values: list[float], random: object
) -> None:
    rows = rows_with(values)
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]

    one = compute_advantages(rows, baselines={}, decay=0.9)
    other = compute_advantages(shuffled, baselines={}, decay=0.9)

    assert other.values == pytest.approx(one.values, abs=1e-9)
    assert other.baselines == pytest.approx(one.baselines)
