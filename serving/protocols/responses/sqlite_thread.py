"""A SQLite file behind its own thread, so that the event loop never waits for the disk."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from onlinerl.errors import ServiceUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SqliteThread:
    """One thread with one connection; calls run in order.

    At most `max_waiting` calls wait. A call that times out after `timeout_s` seconds still runs
    later, and counts as waiting until then.
    """

    def __init__(self, path: Path, *, timeout_s: float, max_waiting: int) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")
        self._connection: sqlite3.Connection | None = None

    async def run(self, call: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `call`, which runs in the thread as one transaction.

        Raises:
            ServiceUnavailable: too many calls wait, this one took too long, or SQLite failed.
        """
        if self._num_waiting >= self._max_waiting:
            raise ServiceUnavailable(f"{self._num_waiting} calls wait for {self._path}")
        self._num_waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, self._transact, call)
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout_s)
        except TimeoutError as error:
            raise ServiceUnavailable(
                f"no answer in {self._timeout_s} s from {self._path}"
            ) from error
        except sqlite3.Error as error:
            raise ServiceUnavailable(f"{self._path}: {error}") from error

    def close(self) -> None:
        """Finish the waiting calls, then disconnect; does not wait longer than the timeout."""
        closing = self._thread.submit(self._disconnect)
        try:
            closing.result(self._timeout_s)
        except TimeoutError:
            logger.error("a SQLite file did not close in time", extra={"path": str(self._path)})
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _transact(self, call: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            self._connection = connect(self._path, timeout_s=self._timeout_s)
        with self._connection:
            return call(self._connection)

    def _done(self, future: "asyncio.Future[T]") -> None:
        self._num_waiting -= 1
        if not future.cancelled():
            future.exception()  # marks it as seen: a caller that timed out never looks


def connect(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    """A connection that waits up to `timeout_s` seconds for other writers.

    Writers do not block readers, and deleted rows are overwritten.
    """
    connection = sqlite3.connect(path, timeout=timeout_s, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    # A crash of the process loses nothing; one of the machine at most the last transactions.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    # Without this, `OR REPLACE` would not fire the trigger that counts deleted rows.
    connection.execute("PRAGMA recursive_triggers = ON")
    return connection
