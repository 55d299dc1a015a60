"""Appends to the spool's segment files, fsyncs them, and cuts off what a failed write left."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from onlinerl.serving.spool.segment_files import segment_path

logger = logging.getLogger(__name__)


class Appender:
    """Writes one segment file at a time: CLOSED -`begin`-> OPEN -`end`-> CLOSED. Not thread-safe.

    Every method may raise an OSError of the disk. After a failed `append` the file holds none of
    the data; if the data could not be cut off, the file is closed.

    Args:
        folder: Folder of the spool.
        fsync_s: Longest time between fsyncs, seconds.
        clock: Monotonic time, seconds.
    """

    def __init__(
        self, folder: Path, *, fsync_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._fsync_s = fsync_s
        self._clock = clock
        self._file: BinaryIO | None = None
        self._size = 0
        self._begun_at_s = 0.0
        self._synced_at_s = clock()
        self.is_unsynced = False
        """Whether a crash of the machine could lose something."""

    @property
    def is_open(self) -> bool:
        """Whether there is a segment to append to."""
        return self._file is not None

    @property
    def age_s(self) -> float:
        """Seconds since the open segment was begun."""
        return self._clock() - self._begun_at_s

    def begin(self, number: int) -> None:
        """Create the file of a segment and open it."""
        path = segment_path(self._folder, number)
        self._file = cast(BinaryIO, path.open("xb", buffering=0))
        self._size = 0
        self._begun_at_s = self._clock()

    def append(self, data: bytes) -> None:
        """Append all of `data` to the open segment."""
        assert self._file is not None
        try:
            write_all(self._file, data)
        except OSError:
            self._cut_off()
            raise
        self._size += len(data)
        self.is_unsynced = True

    def sync(self, *, force: bool) -> None:
        """Fsync the open segment if the last fsync was `fsync_s` ago, or if `force` is set."""
        is_due = self._clock() - self._synced_at_s >= self._fsync_s
        if self._file is None or not self.is_unsynced or not (is_due or force):
            return
        self._synced_at_s = self._clock()
        self.is_unsynced = False
        try:
            os.fsync(self._file.fileno())
        except OSError:
            # The disk may have lost pages of this file, so nothing may be appended after them.
            self._close()
            raise

    def end(self) -> None:
        """Fsync the open segment and close it."""
        if self._file is not None:
            try:
                self.sync(force=True)
            finally:
                self._close()

    def _cut_off(self) -> None:
        """Cut off a failed append; otherwise a torn record would lie between whole ones."""
        assert self._file is not None
        try:
            self._file.seek(self._size)
            self._file.truncate()
        except OSError:
            logger.exception("a torn record cannot be cut off")
            self._close()

    def _close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError:
            logger.exception("a spool segment cannot be closed")


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may take only a part at once."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
