"""How far ingest is: a progress bar in a terminal, a line in the log elsewhere."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """Called after every poll, so `report` must be quick."""

    def report(self, num_records: int, *, lag: int | None) -> None:
        """Show how far ingest is.

        Args:
            num_records: Records committed since the start.
            lag: Records not read yet; None while it is unknown.
        """
        ...

    def close(self) -> None:
        """End the report; `report` is not called again."""
        ...


class NoProgress(Progress):
    """Shows nothing."""

    @override
    def report(self, num_records: int, *, lag: int | None) -> None:
        pass

    @override
    def close(self) -> None:
        pass


class ProgressLog(Progress):
    """Writes a line to the log when records were stored, at most one per `interval_s` seconds."""

    def __init__(self, *, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last_at = clock()
        self._last_num_records = 0

    @override
    def report(self, num_records: int, *, lag: int | None) -> None:
        elapsed_s = self._clock() - self._last_at
        if num_records == self._last_num_records or elapsed_s < self._interval_s:
            return
        rate = (num_records - self._last_num_records) / elapsed_s
        left = "unknown" if lag is None else lag
        logger.info("%d records stored, %.0f a second, lag %s", num_records, rate, left)
        self._last_num_records, self._last_at = num_records, self._clock()

    @override
    def close(self) -> None:
        pass


class ProgressBar(Progress):
    """A progress bar on standard error, which ends at the known end of the log."""

    def __init__(self) -> None:
        # rich takes a while to import and only a terminal needs it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = ("records", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("records", total=None)
        self._bar.start()

    @override
    def report(self, num_records: int, *, lag: int | None) -> None:
        total = None if lag is None else num_records + lag
        self._bar.update(self._task, completed=num_records, total=total)

    @override
    def close(self) -> None:
        self._bar.stop()


def progress_for(*, once: bool) -> Progress:
    """A bar when somebody waits at a terminal for the end (`once`), else lines in the log."""
    if once and sys.stderr.isatty():
        return ProgressBar()
    return ProgressLog(interval_s=10.0 if once else 60.0)
