"""When a cycle is due."""

import pytest

from onlinerl.trainer.bookkeeping.ledger import LastCycle
from onlinerl.trainer.schedule.due import Intervals, seconds_until_due

INTERVALS = Intervals(interval_s=100.0, retry_after_s=10.0)


def wait(
    now: float,
    *,
    last: LastCycle | None = None,
    is_unfinished: bool = False,
    last_attempt_at: float | None = None,
    intervals: Intervals = INTERVALS,
) -> float:
    return seconds_until_due(
        now,
        intervals=intervals,
        last=last,
        is_unfinished=is_unfinished,
        last_attempt_at=last_attempt_at,
    )


REGISTERED = LastCycle(finished_at=1000.0, status="registered")
FAILED = LastCycle(finished_at=1000.0, status="failed")


def test_the_first_cycle_is_due_at_once() -> None:
    assert wait(5.0) == 0


@pytest.mark.parametrize(("now", "expected"), [(1000.0, 100.0), (1099.0, 1.0), (1100.0, 0.0)])
def test_a_cycle_is_due_an_interval_after_the_last(now: float, expected: float) -> None:
    assert wait(now, last=REGISTERED) == expected


def test_after_being_down_for_many_intervals_one_cycle_is_due() -> None:
    assert wait(1_000_000.0, last=REGISTERED) == 0


@pytest.mark.parametrize(
    ("interval_s", "retry_after_s", "expected"),
    [(14_400.0, 60.0, 600.0), (100.0, 10.0, 100.0), (100.0, 900.0, 900.0)],
)
def test_a_cycle_that_was_given_up_is_not_followed_by_the_same_at_once(
    interval_s: float, retry_after_s: float, expected: float
) -> None:
    intervals = Intervals(interval_s=interval_s, retry_after_s=retry_after_s)

    assert wait(1000.0, last=FAILED, intervals=intervals) == expected


def test_an_unfinished_cycle_does_not_wait_for_the_interval() -> None:
    assert wait(1001.0, last=REGISTERED, is_unfinished=True) == 0


def test_a_process_that_died_is_not_repeated_in_a_tight_loop() -> None:
    assert wait(1005.0, last=REGISTERED, is_unfinished=True, last_attempt_at=1001.0) == 6.0


def test_an_attempt_does_not_shorten_the_interval() -> None:
    assert wait(1005.0, last=REGISTERED, last_attempt_at=900.0) == 95.0
