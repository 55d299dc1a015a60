"""Row filters against numbers worked by hand."""

import math

import pytest
import torch

from onlinerl.trainer.losses.filters import k3, rows_to_keep
from onlinerl.trainer.losses.spec import LossSpec


def keep(log_ratios: list[list[float]], spec: LossSpec) -> list[bool]:
    flat = [value for row in log_ratios for value in row]
    rows = [number for number, row in enumerate(log_ratios) for _ in row]
    kept_R = rows_to_keep(spec, log_ratio_N=torch.tensor(flat), rows_N=torch.tensor(rows))
    return kept_R.tolist()  # type: ignore[no-any-return]


def test_k3_of_a_doubled_probability() -> None:
    assert k3(torch.tensor([math.log(2.0), 0.0])).tolist() == pytest.approx([1 - math.log(2.0), 0])


def test_k3_keeps_a_row_by_its_mean_and_not_by_its_worst_token() -> None:
    # e^0.2 - 0.2 - 1 = 0.0214; over three tokens 0.0071.
    assert keep([[0.2], [0.2, 0.0, 0.0]], LossSpec(filters=("k3",), k3_max=0.01)) == [False, True]


def test_geometric_mean_lets_opposite_moves_cancel() -> None:
    spec = LossSpec(filters=("geometric",), geometric_band=0.01)

    assert keep([[0.5, -0.5], [0.005, 0.005], [0.02, 0.02], [-0.02, -0.02]], spec) == [
        True,
        True,
        False,
        False,
    ]


def test_veto_drops_a_row_for_a_single_token() -> None:
    spec = LossSpec(filters=("veto",), veto_ratio=1e-5)

    assert keep([[0.0, math.log(0.9e-5)], [0.0, math.log(1.1e-5)]], spec) == [False, True]


def test_a_row_must_pass_every_filter() -> None:
    spec = LossSpec(filters=("k3", "veto", "geometric"), k3_max=0.5)

    assert keep([[0.0], [0.3]], spec) == [True, False]


def test_without_filters_every_row_is_kept() -> None:
    assert keep([[9.0], [-19.0]], LossSpec()) == [True, True]
