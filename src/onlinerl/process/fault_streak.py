"""Counts the faults of a loop whose step keeps failing: it backs off and becomes unready."""


class FaultStreak:
    """The faults of a loop since its last success.

    Use one for every loop that goes on after a fault: call `add` for a fault and `clear` for a
    success, wait `wait_s`, and report `trouble` as the reason for being unready. Not thread-safe.

    Args:
        unready_after: Faults in a row after which `trouble` tells the reason.
        max_wait_s: Longest wait between two attempts, unless the loop's own interval is longer.
    """

    def __init__(self, *, unready_after: int = 1, max_wait_s: float = 60.0) -> None:
        self._unready_after = unready_after
        self._max_wait_s = max_wait_s
        self._reason: str | None = None
        self.length = 0

    def add(self, reason: str) -> bool:
        """Count a fault; returns whether its reason differs from that of the fault before it.

        Log only then: a part that is away for hours is logged once, not at every attempt.
        """
        is_new = reason != self._reason
        self._reason = reason
        self.length += 1
        return is_new

    def clear(self) -> None:
        """Forget the faults, because a step succeeded."""
        self._reason = None
        self.length = 0

    def wait_s(self, interval_s: float) -> float:
        """Seconds until the next attempt: `interval_s`, doubled for every fault after the first."""
        longest = max(interval_s, self._max_wait_s)
        # The exponent is bounded because a float overflows; 2**30 intervals exceed any bound.
        return float(min(interval_s * 2 ** min(max(self.length - 1, 0), 30), longest))

    @property
    def trouble(self) -> str | None:
        """The last reason, once there were `unready_after` faults in a row; else None."""
        return self._reason if self.length >= self._unready_after else None
