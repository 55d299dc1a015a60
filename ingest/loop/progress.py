"""How far ingest is: a bar in a terminal, a line in the log elsewhere."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """Is told after every poll; must be quick."""

    def report(self, num_records: int, *, lag: int | None) -> None:
        """So many records were committed, and so many were not read yet (None: unknown)."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class Silent:
    """Shows nothing."""

    def report(self, num_records: int, *, lag: int | None) -> None:
        """See `Progress`."""

    def close(self) -> None:
        """See `Progress`."""


class LogLines:
    """A line in the log when there is news, at most one per `interval_s`."""

    def __init__(self, *, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._told_at = clock()
        self._told = 0

    def report(self, num_records: int, *, lag: int | None) -> None:
        """See `Progress`."""
        elapsed_s = self._clock() - self._told_at
        if num_records == self._told or elapsed_s < self._interval_s:
            return
        rate = (num_records - self._told) / elapsed_s
        left = "unknown" if lag is None else lag
        logger.info("%d records stored, %.0f a second, lag %s", num_records, rate, left)
        self._told, self._told_at = num_records, self._clock()

    def close(self) -> None:
        """See `Progress`."""


class Bar:
    """A bar on standard error that grows to the end of the log as it is known."""

    def __init__(self) -> None:
        # rich takes a while to import and only a terminal needs it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = ("records", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("records", total=None)
        self._bar.start()

    def report(self, num_records: int, *, lag: int | None) -> None:
        """See `Progress`."""
        total = None if lag is None else num_records + lag
        self._bar.update(self._task, completed=num_records, total=total)

    def close(self) -> None:
        """See `Progress`."""
        self._bar.stop()


def progress_for(*, once: bool) -> Progress:
    """A bar for somebody who waits for the end in front of a terminal, else lines in the log."""
    if once and sys.stderr.isatty():
        return Bar()
    return LogLines(interval_s=10.0 if once else 60.0)
