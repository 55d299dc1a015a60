"""When the next cycle should run: a pure function of the ledger and the clock.

Missed times are not counted: a schedule that was down for several intervals runs one cycle when it
starts again.
"""

from dataclasses import dataclass

from onlinerl.trainer.bookkeeping.ledger import LastCycle

LONGEST_PAUSE_S = 600.0
"""Longest pause after a failed cycle; new rows have to change a window that would fail again."""


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The waits of `ScheduleConfig`, in seconds."""

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
        now: Seconds since 1970.
        intervals: Configured waits.
        last: The latest finished cycle; None before the first.
        is_unfinished: Whether a cycle is planned or trained, and neither registered nor failed.
        last_attempt_at: When the last training process that registered nothing ended.
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
