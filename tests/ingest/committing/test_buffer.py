from dataclasses import dataclass

import pytest

from onlinerl.ingest.committing.buffer import TopicBuffer
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import LogRecord


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


CONFIG = IngestConfig(max_batch_rows=3, max_batch_bytes=1024, max_batch_age_s=10.0)


def records(count: int, size: int = 1) -> list[LogRecord]:
    return [LogRecord("t", 0, n, b"k", b"x" * (size - 1)) for n in range(count)]


def test_an_empty_buffer_is_never_due() -> None:
    clock = Clock()
    buffer = TopicBuffer(CONFIG, clock=clock)
    clock.now = 1e9

    assert not buffer.is_due()
    assert buffer.take() == []


@pytest.mark.parametrize(
    ("count", "size", "age_s", "due"),
    [
        (2, 1, 9.9, False),
        (3, 1, 0, True),
        (1, 1024, 0, True),
        (1, 1023, 0, False),
        (1, 1, 10, True),
    ],
    ids=["young and small", "rows", "bytes", "not quite", "age"],
)
def test_a_buffer_is_due_by_rows_bytes_or_age(
    count: int, size: int, age_s: float, due: bool
) -> None:
    clock = Clock(5.0)
    buffer = TopicBuffer(CONFIG, clock=clock)
    buffer.add(records(count, size))
    clock.now += age_s

    assert buffer.is_due() is due


def test_age_counts_from_the_oldest_record_since_it_was_emptied() -> None:
    clock = Clock()
    buffer = TopicBuffer(CONFIG, clock=clock)
    buffer.add(records(1, 1000))
    clock.now = 6.0
    buffer.add(records(1))
    assert len(buffer.take()) == 2
    buffer.add(records(1, 1000))
    clock.now = 12.0

    assert not buffer.is_due()
