"""The end of the spool's files: appends, fsyncs, and cuts off what a failed write left."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from onlinerl.serving.spool.segment_files import segment_path

logger = logging.getLogger(__name__)


class Appender:
    """One segment file at a time: CLOSED -`begin`-> OPEN -`end`-> CLOSED. Used by one thread.

    Every method may raise the OSError of the disk. After a failed `append` the file holds none of
    the data, or is closed because that could not be made sure.
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
        """Since the open segment was begun."""
        return self._clock() - self._begun_at_s

    def begin(self, number: int) -> None:
        """Make the file of a segment."""
        path = segment_path(self._folder, number)
        self._file = cast(BinaryIO, path.open("xb", buffering=0))
        self._size = 0
        self._begun_at_s = self._clock()

    def append(self, data: bytes) -> None:
        """Put all of `data` at the end of the open segment."""
        assert self._file is not None
        try:
            write_all(self._file, data)
        except OSError:
            self._cut_off()
            raise
        self._size += len(data)
        self.is_unsynced = True

    def sync(self, *, force: bool) -> None:
        """Make sure of what was appended, if the last time is `fsync_s` ago or `force` is set."""
        due = self._clock() - self._synced_at_s >= self._fsync_s
        if self._file is None or not self.is_unsynced or not (due or force):
            return
        self._synced_at_s = self._clock()
        self.is_unsynced = False
        try:
            os.fsync(self._file.fileno())
        except OSError:
            # Nothing may follow pages that the disk did not take.
            self._close()
            raise

    def end(self) -> None:
        """Make sure of the open segment and close it."""
        if self._file is not None:
            try:
                self.sync(force=True)
            finally:
                self._close()

    def _cut_off(self) -> None:
        """Every try would leak what the last one left, or tear the file."""
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
    """Unbuffered files may take less than they are given."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
