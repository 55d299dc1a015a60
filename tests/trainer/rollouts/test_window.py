"""Choosing a window."""

import pytest

from onlinerl.errors import TooFewRows
from onlinerl.trainer.rollouts.window import Candidate, Exclusion, choose_window, recent_versions
from tests.trainer.builders import row


def chosen(number: int) -> Candidate:
    return Candidate(row=row(number), exclusion=None)


def excluded(reason: Exclusion) -> Candidate:
    return Candidate(row=None, exclusion=reason)


@pytest.mark.parametrize(
    ("served", "champion", "max_lag", "expected"),
    [
        ([1, 2, 5, 6], 6, 2, {6, 5, 2}),  # 3 and 4 were refused: not promotions
        ([1, 2, 3], 3, 0, {3}),
        ([1, 2, 3, 2], 2, 1, {2, 3}),  # rolled back: 3 served just before
        ([1, 2, 1, 2, 1], 1, 5, {1, 2}),
        ([], 4, 2, {4}),
    ],
)
def test_lag_counts_promotions_and_not_version_numbers(
    served: list[int], champion: int, max_lag: int, expected: set[int]
) -> None:
    assert recent_versions(served, champion=champion, max_lag=max_lag) == expected


def test_the_newest_rows_are_taken_oldest_first() -> None:
    window = choose_window([chosen(n) for n in (4, 1, 3, 2)], max_rows=3, min_rows=1)

    assert [item.interaction_id for item in window.rows] == ["i0002", "i0003", "i0004"]
    assert window.excluded == {"beyond_max_rows": 1}


def test_what_is_left_out_is_counted_by_reason() -> None:
    window = choose_window(
        [chosen(0), excluded("unlabelled"), excluded("held_out"), excluded("unlabelled")],
        max_rows=9,
        min_rows=1,
    )

    assert window.excluded == {"held_out": 1, "unlabelled": 2}


def test_too_few_rows_says_how_many_and_why() -> None:
    with pytest.raises(TooFewRows, match=r"1 labelled rows .* 2 are needed .* 1 unlabelled"):
        choose_window([chosen(0), excluded("unlabelled")], max_rows=9, min_rows=2)


def test_an_empty_log_is_too_few_rows() -> None:
    with pytest.raises(TooFewRows, match="nothing else was logged"):
        choose_window([], max_rows=9, min_rows=1)
