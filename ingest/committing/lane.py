"""One batch is written while the next one is gathered."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent import futures

from onlinerl.errors import CommitStuck
from onlinerl.ingest.batches.sorting import Route
from onlinerl.ingest.committing.buffer import size_of
from onlinerl.ingest.event_log.log import LogRecord

_Order = tuple["futures.Future[None]", Route, Sequence[LogRecord]]
Write = Callable[[Route, Sequence[LogRecord]], None]


class CommitLane:
    """A thread with room for one batch: `IDLE -> BUSY -> settled -> IDLE`.

    Whoever submits must have settled the batch before; so batches are written in order, and an
    error of one is seen before the next is begun.

    Args:
        write: Writes one batch.
        timeout_s: Longest time that one batch may take.
    """

    def __init__(self, write: Write, *, timeout_s: float) -> None:
        self._write = write
        self._timeout_s = timeout_s
        self._work: queue.Queue[_Order | None] = queue.Queue(1)
        self._pending: futures.Future[None] | None = None
        self.size_bytes = 0
        """Of the batch that is being written."""
        threading.Thread(target=self._run, name="commit", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being written right now."""
        return self._pending is not None and not self._pending.done()

    @property
    def is_free(self) -> bool:
        """Whether there is no batch, written or not settled."""
        return self._pending is None

    def wait(self, timeout_s: float) -> None:
        """Return when no batch is being written any more, or when the time is up."""
        if self._pending is not None:
            futures.wait([self._pending], timeout_s)

    def submit(self, route: Route, records: Sequence[LogRecord]) -> None:
        """Begin to write a batch."""
        assert self._pending is None, "the batch before is not settled"
        if not records:
            return
        self._pending, self.size_bytes = futures.Future(), size_of(records)
        self._work.put((self._pending, route, records), timeout=self._timeout_s)

    def settle(self) -> None:
        """Wait for the batch that is being written, if there is one.

        Raises:
            StoreConflict, ServiceUnavailable: from the writing.
            CommitStuck: the time is up, and nobody knows whether the commit will happen.
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
        """End the thread, unless it is stuck in a commit."""
        if self.is_free:
            self._work.put(None, timeout=self._timeout_s)

    def _run(self) -> None:
        while (order := self._work.get()) is not None:
            future, route, records = order
            try:
                self._write(route, records)
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                future.set_exception(error)
            else:
                future.set_result(None)
            del order, future, route, records  # a batch must not outlive its commit here
