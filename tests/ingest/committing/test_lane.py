import threading
from collections.abc import Sequence

import pytest

from onlinerl.errors import CommitStuck, StoreConflict
from onlinerl.ingest.batches.sorting import ROUTES, Route
from onlinerl.ingest.committing.lane import CommitLane
from onlinerl.ingest.event_log.log import LogRecord

RECORD = LogRecord("t", 0, 0, b"k", b"value")


class Writing:
    """Remembers batches; waits for `go`, and raises what it is told to."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.go = threading.Event()
        self.error: Exception | None = None

    def __call__(self, route: Route, records: Sequence[LogRecord]) -> None:
        self.go.wait(30)
        self.batches.append(len(records))
        if self.error is not None:
            raise self.error


def test_a_batch_is_written_beside_and_its_size_counts_until_it_is_settled() -> None:
    write = Writing()
    lane = CommitLane(write, timeout_s=30)
    lane.submit(ROUTES[0], [RECORD, RECORD])
    busy, size_bytes, early = lane.is_busy, lane.size_bytes, list(write.batches)
    write.go.set()
    lane.settle()
    lane.close()

    assert (busy, size_bytes, early) == (True, 12, [])
    assert (write.batches, lane.is_busy, lane.is_free, lane.size_bytes) == ([2], False, True, 0)


def test_nothing_to_write_occupies_nothing() -> None:
    lane = CommitLane(Writing(), timeout_s=30)
    lane.submit(ROUTES[0], [])

    assert lane.is_free
    lane.settle()
    lane.close()


def test_an_error_is_raised_where_it_is_waited_for_and_once() -> None:
    write = Writing()
    write.error = StoreConflict("fenced")
    write.go.set()
    lane = CommitLane(write, timeout_s=30)
    lane.submit(ROUTES[0], [RECORD])
    with pytest.raises(StoreConflict, match="fenced"):
        lane.settle()
    lane.settle()

    assert lane.is_free
    lane.close()


def test_a_batch_cannot_overtake_the_one_before() -> None:
    write = Writing()
    lane = CommitLane(write, timeout_s=30)
    lane.submit(ROUTES[0], [RECORD])
    with pytest.raises(AssertionError, match="not settled"):
        lane.submit(ROUTES[0], [RECORD])
    write.go.set()
    lane.settle()
    lane.close()


def test_waiting_has_an_end() -> None:
    write = Writing()
    lane = CommitLane(write, timeout_s=0.01)
    lane.submit(ROUTES[0], [RECORD])
    lane.wait(0.01)
    with pytest.raises(CommitStuck, match=r"0\.01 s"):
        lane.settle()

    assert lane.is_busy
    write.go.set()
