"""When the next cycle should run: a pure function of the ledger and the clock.

Nothing is remembered about missed times, so a schedule that was down runs one cycle when it
comes back, not one for every interval it slept through.
"""

from dataclasses import dataclass

from onlinerl.trainer.bookkeeping.ledger import LastCycle

LONGEST_PAUSE_S = 600.0
"""After a cycle that was given up: the same window would fail again until new rows change it."""


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The parts of `ScheduleConfig` that decide."""

    interval_s: float
    retry_after_s: float


def seconds_until_due(
    now: float,
    *,
    intervals: Intervals,
    last: LastCycle | None,
    is_unfinished: bool,
    last_attempt_at: float | None,
) -> float:
    """How long to wait; 0 when a cycle is due.

    Args:
        now: seconds since 1970.
        intervals: configured waits.
        last: the latest finished cycle; None before the first.
        is_unfinished: a cycle was planned and neither registered nor given up.
        last_attempt_at: when this process last tried and did not get a cycle registered.
    """
    due_at = 0.0
    if last is not None and not is_unfinished:
        due_at = last.finished_at + _pause_s(intervals, last=last)
    if last_attempt_at is not None:
        due_at = max(due_at, last_attempt_at + intervals.retry_after_s)
    return max(0.0, due_at - now)


def _pause_s(intervals: Intervals, *, last: LastCycle) -> float:
    if last.status == "registered":
        return intervals.interval_s
    return max(intervals.retry_after_s, min(intervals.interval_s, LONGEST_PAUSE_S))
