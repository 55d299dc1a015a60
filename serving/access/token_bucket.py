"""A rate limit: an average per minute, and at most a minute's worth at once."""

import math


class TokenBucket:
    """Holds up to `per_minute` units and fills at that rate; starts full.

    Pure arithmetic: every method takes the time `now_s`, in seconds of a monotonic clock. A request
    may use more than it reserved, so the level can be below zero; then nothing can be taken until
    the bucket has filled up again.
    """

    def __init__(self, per_minute: int, *, now_s: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._filled_at_s = now_s

    def level(self, now_s: float) -> float:
        """Units in the bucket; may be negative."""
        growth = max(now_s - self._filled_at_s, 0.0) * self.capacity / 60
        return min(self._level + growth, self.capacity)

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount`, or all that fits in the bucket, can be taken; 0 for now."""
        missing = min(amount, self.capacity) - self.level(now_s)
        return max(missing, 0.0) * 60 / self.capacity

    def change(self, amount: float, now_s: float) -> None:
        """Give (positive) or take (negative) units."""
        self._level = min(self.level(now_s) + amount, self.capacity)
        self._filled_at_s = max(now_s, self._filled_at_s)

    def remaining(self, now_s: float) -> int:
        """Whole units in the bucket, at least 0."""
        return max(math.floor(self.level(now_s)), 0)

    def reset_s(self, now_s: float) -> float:
        """Seconds until the bucket is full."""
        return (self.capacity - self.level(now_s)) * 60 / self.capacity
