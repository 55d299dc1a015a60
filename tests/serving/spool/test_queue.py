import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from onlinerl.errors import LeaseHeld, SpoolFull
from onlinerl.rollout_store.event_log import TopicIdPartition
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool import appender as appender_module
from onlinerl.serving.spool import queue as spool_module
from onlinerl.serving.spool import writer as spool_writer_module
from onlinerl.serving.spool.queue import Spool
from onlinerl.serving.spool.segment_files import (
    Position,
    pack,
    read_segment,
    segment_numbers,
    segment_path,
)

IDS = {"t": "1"}
PLACE = TopicIdPartition("t", "1", 0)


def record(number: int, *, size: int = 10) -> Record:
    return Record(topic="t", key=f"k{number}", value=str(number).encode().ljust(size, b"."))


def open_spool(folder: Path, **config: Any) -> Spool:
    metrics = GatewayMetrics(CollectorRegistry())
    return Spool(folder, SpoolConfig(**config), metrics=metrics)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = open_spool(tmp_path, segment_bytes=4096)
    yield spool
    spool.close(timeout_s=5)


def put(spool: Spool, *numbers: int, size: int = 10) -> None:
    """Put records and wait until the last is stored."""
    for number in numbers:
        stored = threading.Event()
        spool.put(record(number, size=size), on_stored=stored.set)
        assert stored.wait(60)


def read(spool: Spool, *, max_records: int = 1000, timeout_s: float = 0) -> list[str]:
    batch = spool.read(max_records=max_records, max_bytes=10**9, timeout_s=timeout_s)
    return [stored.record.key for stored in batch]


def ack_all(spool: Spool) -> list[str]:
    batch = spool.read(max_records=1000, max_bytes=10**9, timeout_s=0)
    if batch:
        spool.ack(batch, topic_ids=IDS, ends={PLACE: len(batch)})
    return [stored.record.key for stored in batch]


def test_records_come_out_as_they_went_in(spool: Spool) -> None:
    put(spool, 1, 2, 3)

    batch = spool.read(max_records=10, max_bytes=10**9, timeout_s=5)
    assert [stored.record for stored in batch] == [record(1), record(2), record(3)]


def test_batches_are_bounded_and_go_on_where_the_last_ended(spool: Spool) -> None:
    put(spool, 1, 2, 3)

    assert read(spool, max_records=2) == ["k1", "k2"]
    assert read(spool, max_records=2) == ["k3"]
    assert read(spool) == []


def test_reading_waits_for_the_first_record(spool: Spool) -> None:
    threading.Timer(0.05, lambda: put(spool, 1)).start()

    assert read(spool, timeout_s=5) == ["k1"]


def test_segments_are_walked_in_order(spool: Spool, tmp_path: Path) -> None:
    put(spool, *range(20), size=1000)

    assert len(segment_numbers(tmp_path)) > 2
    assert read(spool) == [f"k{n}" for n in range(20)]


def test_what_was_not_acknowledged_is_read_again(spool: Spool) -> None:
    put(spool, 1, 2, 3)
    first = spool.read(max_records=1, max_bytes=10**9, timeout_s=5)
    spool.ack(first, topic_ids=IDS, ends={PLACE: len(first)})
    read(spool)
    spool.reread()

    assert read(spool) == ["k2", "k3"]


def test_a_new_process_goes_on_at_the_cursor(tmp_path: Path) -> None:
    first = open_spool(tmp_path)
    put(first, 1, 2)
    ack_all(first)
    put(first, 3)
    first.close(timeout_s=5)
    second = open_spool(tmp_path)
    put(second, 4)

    assert second.topic_ids == IDS
    assert read(second) == ["k3", "k4"]
    second.close(timeout_s=5)


def test_a_cursor_that_cannot_be_read_ships_everything_again(tmp_path: Path) -> None:
    first = open_spool(tmp_path)
    put(first, 1)
    ack_all(first)
    first.close(timeout_s=5)
    (tmp_path / "cursor.json").write_text('{"segment": 1')
    second = open_spool(tmp_path)

    assert read(second) == ["k1"]
    second.close(timeout_s=5)


def test_rewinding_ships_what_is_kept_once_more(spool: Spool) -> None:
    put(spool, *range(10), size=1000)
    ack_all(spool)
    put(spool, 10)
    spool.rewind(topic_ids={"t": "2"})

    assert read(spool) == [f"k{n}" for n in range(11)]
    assert spool.topic_ids == {"t": "2"}


def test_rewinding_misses_nothing_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, disk = threading.Event(), threading.Event()
    write_all = appender_module.write_all

    def slow(*args: Any) -> None:
        began.set()
        assert disk.wait(60)
        write_all(*args)

    monkeypatch.setattr(appender_module, "write_all", slow)
    spool = open_spool(tmp_path)
    spool.put(record(1))
    assert began.wait(60)
    spool.rewind(topic_ids={"t": "2"})
    disk.set()

    assert read(spool, timeout_s=5) == ["k1"]
    spool.close(timeout_s=5)


def test_shipped_segments_are_kept_up_to_their_bound(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=4096, retain_bytes=9000)
    put(spool, *range(40), size=1000)
    ack_all(spool)
    kept = sum(segment_path(tmp_path, n).stat().st_size for n in segment_numbers(tmp_path))
    spool.rewind(topic_ids=IDS)
    keys = read(spool)
    spool.close(timeout_s=5)

    assert kept <= 9000 + 4096 + 1100
    assert 4 <= len(keys) < 40
    assert keys[-1] == "k39"


def test_shipped_segments_that_the_tables_hold_are_not_kept(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=4096)
    put(spool, *range(5), size=1000)
    put(spool, *range(5, 10))  # too few bytes to end the segment that they are written to
    ack_all(spool)
    spool.confirm({PLACE: 9})
    spool.prune()
    before = segment_numbers(tmp_path)
    spool.confirm({PLACE: 10})
    spool.prune()
    after = segment_numbers(tmp_path)
    dropped = spool._metrics.registry.get_sample_value(
        "onlinerl_gateway_spool_dropped_segments_total", {"reason": "confirmed"}
    )
    spool.close(timeout_s=5)

    assert len(before) > 1
    assert after == before[-1:], "what is written to stays"
    assert dropped == len(before) - 1


def test_shipped_segments_are_kept_up_to_their_age(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=4096, retain_s=100)
    put(spool, *range(10), size=1000)
    ack_all(spool)
    oldest, *others = segment_numbers(tmp_path)
    os.utime(segment_path(tmp_path, oldest), (time.time() - 101,) * 2)
    spool.prune()
    spool.close(timeout_s=5)

    assert segment_numbers(tmp_path) == others


def test_dropping_segments_holds_up_nobody_and_bears_with_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = open_spool(tmp_path, segment_bytes=4096)
    put(spool, *range(10), size=1000)
    ack_all(spool)
    oldest, *others = segment_numbers(tmp_path)
    segment_path(tmp_path, oldest).unlink()
    age_s = spool_module._age_s
    waiting: list[bool] = []

    def looking(path: Path) -> float:
        other = threading.Thread(target=lambda: spool.backlog_bytes)
        other.start()
        other.join(5)
        waiting.append(other.is_alive())
        return age_s(path)

    monkeypatch.setattr(spool_module, "_age_s", looking)
    spool.prune()
    spool.rewind(topic_ids=IDS)

    assert waiting
    assert not any(waiting)
    assert segment_numbers(tmp_path) == others
    assert read(spool)[-1] == "k9"
    spool.close(timeout_s=5)


def test_unshipped_segments_are_never_dropped(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, segment_bytes=4096, retain_bytes=0, retain_s=0)
    put(spool, *range(10), size=1000)
    first = spool.read(max_records=1, max_bytes=10**9, timeout_s=5)
    spool.ack(first, topic_ids=IDS, ends={PLACE: len(first)})
    spool.reread()

    assert read(spool) == [f"k{n}" for n in range(1, 10)]
    spool.close(timeout_s=5)


def test_the_backlog_is_what_the_log_has_not_taken(spool: Spool) -> None:
    put(spool, 1, 2)
    one = len(pack(record(1)))
    before = spool.backlog_bytes
    ack_all(spool)

    assert (before, spool.backlog_bytes, spool.is_drained) == (2 * one, 0, True)


def test_a_full_spool_refuses_and_recovers_when_shipped(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, max_bytes=64 * 1024, segment_bytes=64 * 1024)
    put(spool, *range(60), size=1000)
    with pytest.raises(SpoolFull, match="max_bytes"):
        put(spool, *range(60, 80), size=1000)
    stored = len(ack_all(spool))
    put(spool, 99, size=1000)

    assert 60 <= stored < 66
    assert read(spool) == ["k99"]
    spool.close(timeout_s=5)


def test_an_event_over_its_bound_is_refused(tmp_path: Path) -> None:
    spool = open_spool(tmp_path, max_event_bytes=1024)
    with pytest.raises(SpoolFull, match="max_event_bytes"):
        spool.put(record(1, size=2000))
    spool.close(timeout_s=5)
    with pytest.raises(SpoolFull, match="closed"):
        spool.put(record(1))


def test_a_slow_disk_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    write_all = appender_module.write_all

    def slow(*args: Any) -> None:
        assert disk.wait(60)
        write_all(*args)

    monkeypatch.setattr(appender_module, "write_all", slow)
    spool = open_spool(tmp_path, queue_events=5)
    for number in range(5):
        spool.put(record(number))
    with pytest.raises(SpoolFull, match="queue_events"):
        spool.put(record(5))
    disk.set()

    assert read(spool, timeout_s=5)[:1] == ["k0"]
    spool.close(timeout_s=5)


def test_a_failed_write_is_tried_again_and_nothing_is_lost_or_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [OSError(28, "no space left")]
    write_all = appender_module.write_all

    def failing(file: Any, data: bytes) -> None:
        if faults:
            file.write(data[: len(data) // 2])
            raise faults.pop()
        write_all(file, data)

    monkeypatch.setattr(appender_module, "write_all", failing)
    monkeypatch.setattr(spool_writer_module, "_RETRY_S", 0.01)
    spool = open_spool(tmp_path)
    put(spool, 1, 2)

    assert read(spool) == ["k1", "k2"]
    spool.close(timeout_s=5)
    again = open_spool(tmp_path)
    assert read(again) == ["k1", "k2"]
    again.close(timeout_s=5)


@pytest.mark.parametrize("can_be_cut", [True, False])
def test_failed_writes_leak_no_files_while_they_can_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_be_cut: bool
) -> None:
    faults = [OSError(28, "no space left")] * 3
    write_all = appender_module.write_all

    def fail(*_: Any) -> int:
        raise OSError(5, "input/output error")

    def failing(file: Any, data: bytes) -> None:
        if faults:
            file.write(data[: len(data) // 2])
            if not can_be_cut:
                file.truncate = fail
            raise faults.pop()
        write_all(file, data)

    spool = open_spool(tmp_path)
    put(spool, 1)
    monkeypatch.setattr(appender_module, "write_all", failing)
    monkeypatch.setattr(spool_writer_module, "_RETRY_S", 0.01)
    put(spool, 2, 3)
    files = segment_numbers(tmp_path)

    assert read(spool) == ["k1", "k2", "k3"]
    spool.close(timeout_s=5)
    assert files == ([1] if can_be_cut else [1, 2, 3, 4])
    if can_be_cut:
        size = sum(len(pack(record(number))) for number in (1, 2, 3))
        assert segment_path(tmp_path, 1).stat().st_size == size


def test_closing_stores_what_is_queued(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    for number in range(100):
        spool.put(record(number))
    spool.close(timeout_s=5)
    again = open_spool(tmp_path)

    assert read(again) == [f"k{n}" for n in range(100)]
    again.close(timeout_s=5)


def test_a_folder_has_one_owner(spool: Spool, tmp_path: Path) -> None:
    del spool
    with pytest.raises(LeaseHeld, match="another gateway"):
        open_spool(tmp_path)


NO_RECORD = b'{"not": "a record"'
TAILS = {
    "cut": pack(record(9))[:-1],
    "zeros": bytes(64),
    "no record": struct.pack("<II", len(NO_RECORD), zlib.crc32(NO_RECORD)) + NO_RECORD,
}


@pytest.mark.parametrize("num_records", [0, 2])
@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_a_torn_tail_is_no_backlog(tmp_path: Path, tail: bytes, num_records: int) -> None:
    whole = b"".join(pack(record(number)) for number in range(num_records))
    segment_path(tmp_path, 1).write_bytes(whole + tail)
    spool = open_spool(tmp_path)
    keys = ack_all(spool)
    started = time.monotonic()
    nothing = read(spool, timeout_s=0.2)
    waited_s = time.monotonic() - started
    drained = spool.is_drained
    put(spool, 5)

    assert keys == [f"k{n}" for n in range(num_records)]
    assert (nothing, drained) == ([], True)
    assert waited_s >= 0.2
    assert read(spool) == ["k5"]
    spool.close(timeout_s=5)


@given(
    values=st.lists(st.binary(max_size=50), min_size=1, max_size=5),
    cut=st.integers(min_value=0),
    flip=st.booleans(),
)
def test_a_torn_or_damaged_segment_gives_its_beginning_only(
    tmp_path_factory: pytest.TempPathFactory, values: list[bytes], cut: int, flip: bool
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    records = [Record(topic="t", key="k\n", value=value) for value in values]
    packed = [pack(item) for item in records]
    whole = b"".join(packed)
    at = cut % len(whole)
    damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] if flip else whole[:at]
    segment_path(folder, 1).write_bytes(damaged)
    found = [stored.record for stored in read_segment(folder, Position(1, 0), end=len(damaged))]

    intact = 0
    while sum(map(len, packed[: intact + 1])) <= at:
        intact += 1
    assert found == records[:intact]


WRITER = """
import sys, threading
from pathlib import Path
from prometheus_client import CollectorRegistry
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool.queue import Spool

metrics = GatewayMetrics(CollectorRegistry())
spool = Spool(Path(sys.argv[1]), SpoolConfig(segment_bytes=4096), metrics=metrics)
for number in range(10**9):
    stored = threading.Event()
    spool.put(Record(topic="t", key=f"k{number}", value=b"x" * 200), on_stored=stored.set)
    stored.wait(5)
    sys.stdout.write(f"k{number}\\n")
    sys.stdout.flush()
"""


def test_kill_9_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    told = [process.stdout.readline().strip() for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    told += process.stdout.read().split()
    process.wait(10)
    process.stdout.close()
    spool = open_spool(tmp_path)
    found = read(spool, max_records=10**6)
    spool.close(timeout_s=5)

    whole = told if told[-1:] == found[len(told) - 1 : len(told)] else told[:-1]
    assert found[: len(whole)] == whole
    assert len(found) <= len(whole) + 2


def test_events_in_memory_are_bounded_in_bytes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    monkeypatch.setattr(appender_module, "write_all", lambda *_: disk.wait(10) and None)
    spool = open_spool(tmp_path, queue_bytes=2048)
    spool.put(record(1, size=1000))
    with pytest.raises(SpoolFull, match="queue_bytes"):
        spool.put(record(2, size=1500))
    disk.set()
    spool.close(timeout_s=5)


def test_failing_caller_is_counted_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    spool = Spool(tmp_path, SpoolConfig(), metrics=metrics)

    def fail() -> None:
        raise RuntimeError("a bug of a caller")

    spool.put(record(1), on_stored=fail)
    put(spool, 2)
    spool.close(timeout_s=5)

    name = "onlinerl_gateway_spool_callback_failures_total"
    assert metrics.registry.get_sample_value(name) == 1
    assert "a bug of a caller" in caplog.text
    assert read(open_spool(tmp_path)) == ["k1", "k2"]
