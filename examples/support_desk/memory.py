"""Measures the memory of a process and its descendants."""

import psutil


class MemoryMeter:
    """The peak of the summed resident sizes of a process and its descendants.

    Pages that processes share are counted in each of them, so the sum is an upper bound.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.peak_bytes = 0

    @property
    def peak_gib(self) -> float:
        """The largest sum so far, GiB."""
        return self.peak_bytes / 2**30

    def sample(self) -> None:
        """Measure once, and keep the sum when it is the largest."""
        total = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.peak_bytes = max(self.peak_bytes, total)
