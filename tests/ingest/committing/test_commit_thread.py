import threading
from collections.abc import Sequence

import pytest

from onlinerl.errors import CommitStuck, StoreConflict
from onlinerl.ingest.batches.sorting import ROUTES, Route
from onlinerl.ingest.committing.commit_thread import CommitThread
from onlinerl.ingest.event_log.log import LogRecord

RECORD = LogRecord("t", 0, 0, b"k", b"value")


class RecordingWrite:
    """Records the size of each batch. Waits for `go` first, and raises `error` afterwards."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.go = threading.Event()
        self.error: Exception | None = None

    def __call__(self, route: Route, records: Sequence[LogRecord]) -> None:
        self.go.wait(30)
        self.batches.append(len(records))
        if self.error is not None:
            raise self.error


def test_a_batch_is_written_in_another_thread_and_its_size_counts_until_it_is_settled() -> None:
    write = RecordingWrite()
    commit_thread = CommitThread(write, timeout_s=30)
    commit_thread.submit(ROUTES[0], [RECORD, RECORD])
    busy, size_bytes, early = commit_thread.is_busy, commit_thread.size_bytes, list(write.batches)
    write.go.set()
    commit_thread.settle()
    commit_thread.close()

    assert (busy, size_bytes, early) == (True, 12, [])
    assert (
        write.batches,
        commit_thread.is_busy,
        commit_thread.is_free,
        commit_thread.size_bytes,
    ) == ([2], False, True, 0)


def test_an_empty_batch_is_not_submitted() -> None:
    commit_thread = CommitThread(RecordingWrite(), timeout_s=30)
    commit_thread.submit(ROUTES[0], [])

    assert commit_thread.is_free
    commit_thread.settle()
    commit_thread.close()


def test_an_error_is_raised_once_by_settle() -> None:
    write = RecordingWrite()
    write.error = StoreConflict("fenced")
    write.go.set()
    commit_thread = CommitThread(write, timeout_s=30)
    commit_thread.submit(ROUTES[0], [RECORD])
    with pytest.raises(StoreConflict, match="fenced"):
        commit_thread.settle()
    commit_thread.settle()

    assert commit_thread.is_free
    commit_thread.close()


def test_a_batch_cannot_overtake_the_one_before() -> None:
    write = RecordingWrite()
    commit_thread = CommitThread(write, timeout_s=30)
    commit_thread.submit(ROUTES[0], [RECORD])
    with pytest.raises(AssertionError, match="not settled"):
        commit_thread.submit(ROUTES[0], [RECORD])
    write.go.set()
    commit_thread.settle()
    commit_thread.close()


def test_a_batch_that_takes_too_long_is_an_error() -> None:
    write = RecordingWrite()
    commit_thread = CommitThread(write, timeout_s=0.01)
    commit_thread.submit(ROUTES[0], [RECORD])
    commit_thread.wait(0.01)
    with pytest.raises(CommitStuck, match=r"0\.01 s"):
        commit_thread.settle()

    assert commit_thread.is_busy
    write.go.set()
