"""How much memory a process and its descendants take."""

import psutil


class MemoryMeter:
    """Remembers the peak of the summed resident sizes, bytes.

    Pages that processes share are counted once for each, so the sum is an upper bound.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.peak_bytes = 0

    @property
    def peak_gib(self) -> float:
        """The largest sum seen so far, GiB."""
        return self.peak_bytes / 2**30

    def sample(self) -> None:
        """Look once."""
        total = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.peak_bytes = max(self.peak_bytes, total)
