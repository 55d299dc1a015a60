"""The disk is full, or fails: the service goes on, says so, and recovers."""

import contextlib
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from onlinerl.errors import SpoolFull
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool import appender as appender_module
from onlinerl.serving.spool import queue as spool_module
from onlinerl.serving.spool import writer as spool_writer_module
from onlinerl.serving.spool.appender import Appender
from onlinerl.serving.spool.log_writer import MemoryWriter
from onlinerl.serving.spool.queue import Spool
from onlinerl.serving.spool.segment_files import segment_numbers, segment_path
from onlinerl.serving.spool.shipper import Shipper
from tests.waiting import until

IDS = {"t": "1"}
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_writer_module, "_RETRY_S", 0.01)


class Line:
    """A spool, and what it counts."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.spool = Spool(folder, SpoolConfig(**config), metrics=self.metrics)
        self.num_refused = 0

    def put(self, *numbers: int, size: int = 1000) -> None:
        for number in numbers:
            try:
                self.spool.put(Record(topic="t", key=f"k{number}", value=b"x" * size))
            except SpoolFull:
                self.num_refused += 1

    def count(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"onlinerl_gateway_{name}", labels)
        return found or 0.0

    def take(self) -> list[str]:
        """Ship everything that can be read."""
        found: list[str] = []
        while batch := self.spool.read(max_records=100, max_bytes=10**9, timeout_s=0):
            self.spool.ack(batch, topic_ids=IDS, ends={})
            found += [stored.record.key for stored in batch]
        return found

    def close(self) -> None:
        self.spool.close(timeout_s=5)


def keys(*numbers: int) -> list[str]:
    return [f"k{number}" for number in numbers]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_loses_what_no_longer_fits_and_recovers_when_there_is_space(
    small_disk: Path,
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 200_000)
    line = Line(small_disk / "spool", queue_events=20, segment_bytes=16_384)
    for number in range(200):
        line.put(number)
        time.sleep(0.001)
    until(lambda: line.spool.fault is not None)
    fault, refused = line.spool.fault, line.num_refused
    ballast.unlink()
    until(lambda: line.spool.fault is None)
    line.put(1000)
    until(lambda: line.spool.num_waiting == 201 - refused)
    until(lambda: line.spool.fault is None)
    line.close()
    again = Line(small_disk / "spool")
    found = again.take()
    again.close()

    assert "No space" in (fault or "")
    assert refused > 0
    assert line.count("spool_write_failures_total") > 0
    assert len(found) == 201 - refused
    assert found == sorted(found, key=lambda key: int(key[1:]))
    assert found[-1] == "k1000"


def test_shipped_events_make_room_for_new_ones_on_a_full_disk(small_disk: Path) -> None:
    line = Line(small_disk / "spool", segment_bytes=16_384)
    shipped: list[str] = []
    for number in range(600):
        line.put(number)
        if number % 10 == 9:
            until(lambda: line.spool.num_waiting == 0 or line.spool.backlog_bytes > 0)
            shipped += line.take()
    until(lambda: line.spool.num_waiting == line.spool._writer.num_stored - len(shipped))
    while line.spool.num_waiting:
        shipped += line.take()
    line.close()

    assert line.num_refused == 0
    assert shipped == keys(*range(600))
    assert line.count("spool_write_failures_total") > 0


def test_a_cursor_that_cannot_be_written_stops_no_shipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(tmp_path, segment_bytes=4096, retain_bytes=0)

    def full(*_: Any) -> None:
        raise NO_SPACE

    monkeypatch.setattr(spool_module, "store_cursor", full)
    log = MemoryWriter()
    config = SpoolConfig(topic_poll_s=0.02)
    shipper = Shipper(line.spool, connect=log.connect, config=config, metrics=line.metrics)
    shipper.start()
    line.put(*range(30))
    until(lambda: line.spool.is_drained)
    shipper.close(drain_s=1)
    line.close()

    assert [record.key for record in log.records] == keys(*range(30))
    assert len(segment_numbers(tmp_path)) <= 1
    assert line.count("spool_write_failures_total") > 0


@pytest.mark.parametrize("step", ["open", "write", "fsync"])
def test_whatever_fails_everything_that_was_taken_is_stored_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    faults = [NO_SPACE] * 5
    steps: dict[str, Callable[..., Any]] = {
        "open": Path.open,
        "write": appender_module.write_all,
        "fsync": os.fsync,
    }
    real = steps[step]

    def failing(*arguments: Any, **options: Any) -> Any:
        if faults and threading.current_thread().name == "spool":
            raise faults.pop()
        return real(*arguments, **options)

    target, name = {
        "open": (Path, "open"),
        "write": (appender_module, "write_all"),
        "fsync": (os, "fsync"),
    }[step]
    monkeypatch.setattr(target, name, failing)
    line = Line(tmp_path, fsync_s=0, segment_bytes=4096)
    put = 0
    while faults or put < 30:
        line.put(put)
        put += 1
        time.sleep(0.002)
    until(lambda: line.spool.num_waiting == put and line.spool.backlog_bytes > put * 1000)
    found = line.take()
    line.close()

    assert found == keys(*range(put))
    assert line.count("spool_write_failures_total") == 5


@pytest.mark.parametrize("step", ["unlink", "stat"])
def test_a_full_disk_that_deletes_nothing_either_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    line = Line(tmp_path, segment_bytes=4096)
    line.put(*range(10))
    until(lambda: line.spool.backlog_bytes > 10_000)
    shipped = line.take()
    real = getattr(Path, step)
    refused: list[str] = []

    def full(*_: Any) -> None:
        raise NO_SPACE

    def failing(path: Path, **options: Any) -> Any:
        if threading.current_thread().name == "spool":
            refused.append(path.name)
            raise NO_SPACE
        return real(path, **options)

    with monkeypatch.context() as disk:
        disk.setattr(appender_module, "write_all", full)
        with monkeypatch.context() as copying:
            copying.setattr(Path, step, failing)
            line.put(10)
            until(lambda: refused)
        # What could not be deleted is deleted when the disk lets it.
        until(lambda: line.count("spool_dropped_segments_total", reason="disk_full"))
    until(lambda: line.spool.backlog_bytes > 1000)
    shipped += line.take()
    line.close()

    assert shipped == keys(*range(11))


def test_what_a_broken_disk_does_not_take_before_the_end_is_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(appender_module, "write_all", broken)
    line = Line(tmp_path)
    line.put(1, 2, 3)
    until(lambda: line.spool.fault is not None)
    line.close()

    assert line.count("events_lost_total", reason="disk") == 3
    assert "events are lost" in caplog.text


def test_a_dead_log_keeps_memory_and_disk_within_their_bounds(tmp_path: Path) -> None:
    """Counted, not measured: what is held is what the bounds allow, however much is put."""
    line = Line(
        tmp_path, queue_events=50, max_bytes=256 * 1024, segment_bytes=64 * 1024, retain_bytes=0
    )
    most_queued = most_waiting = 0
    for number in range(5000):
        line.put(number)
        most_queued = max(most_queued, line.spool._writer.num_queued)
        most_waiting = max(most_waiting, line.spool.num_waiting)
    until(lambda: line.spool._writer.num_queued == 0)
    on_disk = sum(segment_path(tmp_path, n).stat().st_size for n in segment_numbers(tmp_path))
    taken = line.take()
    line.close()

    assert most_queued <= 50
    assert most_waiting <= 256
    assert on_disk <= 256 * 1024
    assert len(taken) + line.num_refused == 5000
    assert line.num_refused > 4000


class FaultyFile:
    """A file system that takes so many bytes and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, room: int) -> None:
        self.room = room
        real = appender_module.write_all

        def limited(file: Any, data: bytes) -> None:
            if len(data) > self.room:
                real(file, data[: self.room])
                raise NO_SPACE
            real(file, data)
            self.room -= len(data)

        monkeypatch.setattr(appender_module, "write_all", limited)


def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyFile(monkeypatch, room=10)
    appender = Appender(tmp_path, fsync_s=0)
    appender.begin(1)
    appender.append(b"12345")
    with pytest.raises(OSError, match="No space"):
        appender.append(b"1234567")
    disk.room = 10
    appender.append(b"67")
    appender.end()

    assert segment_path(tmp_path, 1).read_bytes() == b"1234567"


def test_nothing_is_appended_after_pages_that_the_disk_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    appender = Appender(tmp_path, fsync_s=0)
    appender.begin(1)
    appender.append(b"12345")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input"):
            appender.sync(force=True)

    assert not appender.is_open
    with contextlib.suppress(OSError):
        appender.end()
