"""A rate limit: so much per minute on average, and at most a minute's worth at once."""

import math


class TokenBucket:
    """Holds up to `per_minute` units and fills at that rate; starts full.

    Pure arithmetic: every method is told the time in seconds, of a clock that never goes back. What
    was used may turn out to be more than what was taken, so the level may be below zero; then
    nothing can be taken until it has filled up again.
    """

    def __init__(self, per_minute: int, *, now_s: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._filled_at_s = now_s

    def level(self, now_s: float) -> float:
        """Units that are there."""
        grown = max(now_s - self._filled_at_s, 0.0) * self.capacity / 60
        return min(self._level + grown, self.capacity)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` can be taken, 0 when it can; more than fits counts as all."""
        missing = min(amount, self.capacity) - self.level(now_s)
        return max(missing, 0.0) * 60 / self.capacity

    def change(self, amount: float, now_s: float) -> None:
        """Give (positive) or take (negative) units."""
        self._level = min(self.level(now_s) + amount, self.capacity)
        self._filled_at_s = max(now_s, self._filled_at_s)

    def remaining(self, now_s: float) -> int:
        """Whole units that are there, at least 0."""
        return max(math.floor(self.level(now_s)), 0)

    def reset_s(self, now_s: float) -> float:
        """Seconds until it is full."""
        return (self.capacity - self.level(now_s)) * 60 / self.capacity
