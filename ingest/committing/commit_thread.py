"""Writes one batch in a thread of its own, while the next batch is collected."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent import futures

from onlinerl.errors import CommitStuck
from onlinerl.ingest.batches.sorting import Route
from onlinerl.ingest.committing.buffer import size_of
from onlinerl.ingest.event_log.log import LogRecord

_Task = tuple["futures.Future[None]", Route, Sequence[LogRecord]]
Write = Callable[[Route, Sequence[LogRecord]], None]


class CommitThread:
    """A thread that holds one batch: `IDLE -> BUSY -> DONE -> IDLE`.

    Call `settle` before the next `submit`. So batches are written in order, and an error of one is
    raised before the next begins.

    Args:
        write: Writes one batch.
        timeout_s: Longest time that one batch may take, in seconds.
    """

    def __init__(self, write: Write, *, timeout_s: float) -> None:
        self._write = write
        self._timeout_s = timeout_s
        self._tasks: queue.Queue[_Task | None] = queue.Queue(1)
        self._pending: futures.Future[None] | None = None
        self.size_bytes = 0
        """Size of the batch that is being written."""
        threading.Thread(target=self._run, name="commit", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being written right now."""
        return self._pending is not None and not self._pending.done()

    @property
    def is_free(self) -> bool:
        """Whether `submit` may be called: every batch was settled."""
        return self._pending is None

    def wait(self, timeout_s: float) -> None:
        """Wait until no batch is being written, at most `timeout_s` seconds."""
        if self._pending is not None:
            futures.wait([self._pending], timeout_s)

    def submit(self, route: Route, records: Sequence[LogRecord]) -> None:
        """Begin to write a batch; an empty one is ignored."""
        assert self._pending is None, "the batch before is not settled"
        if not records:
            return
        self._pending, self.size_bytes = futures.Future(), size_of(records)
        self._tasks.put((self._pending, route, records), timeout=self._timeout_s)

    def settle(self) -> None:
        """Wait for the batch that is being written, if any, and raise its error.

        Raises:
            StoreConflict, ServiceUnavailable: From the writing.
            CommitStuck: The batch takes longer than `timeout_s`; it may still be committed.
        """
        if self._pending is None:
            return
        try:
            self._pending.result(self._timeout_s)
        except futures.TimeoutError as error:
            raise CommitStuck(
                f"a commit takes longer than ingest.max_commit_s ({self._timeout_s:g} s)"
            ) from error
        finally:
            if self._pending.done():
                self._pending, self.size_bytes = None, 0

    def close(self) -> None:
        """End the thread, unless a batch was not settled."""
        if self.is_free:
            self._tasks.put(None, timeout=self._timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, route, records = task
            try:
                self._write(route, records)
            except BaseException as error:  # noqa: BLE001 - `settle` raises it in the main thread
                future.set_exception(error)
            else:
                future.set_result(None)
            del task, future, route, records  # frees the batch before the next one comes
