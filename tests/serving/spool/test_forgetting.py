"""A user's events leave the spool; everybody else's stay, in order, shipped once."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool import forgetting as forgetting_module
from onlinerl.serving.spool import shipper as shipper_module
from onlinerl.serving.spool.cursor import Cursor, load_cursor, store_cursor
from onlinerl.serving.spool.forgetting import Person, forget_in_segment, forget_user
from onlinerl.serving.spool.log_writer import MemoryWriter
from onlinerl.serving.spool.queue import Spool
from onlinerl.serving.spool.segment_files import Position, pack, segment_numbers, segment_path
from onlinerl.serving.spool.shipper import Shipper

ADA, BOB = "ad" * 16, "b0" * 16
IDS = {"t": "1"}


def record(number: int, user: str | None) -> Record:
    value = json.dumps({"n": number, "user": user, "about": ADA}).encode()
    return Record(topic="t", key=f"k{number}", value=value)


def open_spool(folder: Path, **config: Any) -> Spool:
    metrics = GatewayMetrics(CollectorRegistry())
    return Spool(folder, SpoolConfig(**config), metrics=metrics)


def write(folder: Path, *segments: list[Record]) -> None:
    """A spool that nobody uses."""
    folder.mkdir(exist_ok=True)
    for number, records in enumerate(segments, start=1):
        segment_path(folder, number).write_bytes(b"".join(map(pack, records)))


def read(folder: Path) -> list[str]:
    """What would be shipped."""
    spool = open_spool(folder)
    batch = spool.read(max_records=1000, max_bytes=10**9, timeout_s=0)
    assert spool.num_waiting == len(batch)
    spool.close(timeout_s=5)
    return [stored.record.key for stored in batch]


def on_disk(folder: Path) -> bytes:
    return b"".join(segment_path(folder, n).read_bytes() for n in segment_numbers(folder))


def test_events_of_the_user_are_gone_whether_they_wait_or_are_kept(tmp_path: Path) -> None:
    records = [record(n, ADA if n % 2 else BOB) for n in range(6)]
    write(tmp_path, records[:4], records[4:])
    store_cursor(tmp_path, Cursor(Position(1, sum(len(pack(r)) for r in records[:3])), IDS))

    assert forget_user(tmp_path, ADA) == 3
    assert read(tmp_path) == ["k4"]
    assert f'"user": "{ADA}"'.encode() not in on_disk(tmp_path)
    assert [key in on_disk(tmp_path) for key in (b"k0", b"k2", b"k4")] == [True] * 3
    assert forget_user(tmp_path, ADA) == 0


def test_a_user_who_is_only_spoken_of_stays(tmp_path: Path) -> None:
    write(tmp_path, [record(1, BOB), record(2, None)])

    assert forget_user(tmp_path, ADA) == 0
    assert read(tmp_path) == ["k1", "k2"]


def of_session(number: int, tenant: str, **fields: str) -> Record:
    value = json.dumps({"user": None, "tenant": tenant, **fields}).encode()
    return Record(topic="t", key=f"k{number}", value=value)


def in_sessions() -> list[Record]:
    """Three of five events without a user belong to a session or an interaction of ADA's."""
    return [
        of_session(1, "acme", session_id="s-ada"),
        of_session(2, "globex", session_id="s-ada"),
        of_session(3, "acme", session_id="s", parent_id="i-ada"),
        of_session(4, "acme", session_id="s", parent_id="i-bob"),
        of_session(5, "acme", interaction_id="i-ada"),
    ]


def test_events_of_whole_sessions_go_whoever_they_are_of(tmp_path: Path) -> None:
    write(tmp_path, in_sessions())

    assert forget_user(tmp_path, ADA, tenant="acme", names=["s-ada", "i-ada"]) == 3
    assert read(tmp_path) == ["k2", "k4"]


def test_what_is_torn_goes_too_for_nobody_can_tell_whose_it_is(tmp_path: Path) -> None:
    write(tmp_path, [record(1, BOB)])
    with segment_path(tmp_path, 1).open("ab") as file:
        file.write(pack(record(2, ADA))[:-1])

    assert forget_user(tmp_path, ADA) == 0
    assert b"k2" not in on_disk(tmp_path)
    assert read(tmp_path) == ["k1"]


def test_the_age_of_a_segment_stays(tmp_path: Path) -> None:
    import os

    write(tmp_path, [record(1, ADA), record(2, BOB)])
    os.utime(segment_path(tmp_path, 1), (1000, 1000))
    forget_user(tmp_path, ADA)

    assert segment_path(tmp_path, 1).stat().st_mtime == 1000


def test_no_spool_holds_nobody(tmp_path: Path) -> None:
    assert forget_user(tmp_path / "none", ADA) == 0


@pytest.mark.parametrize("user_hash", ["ada", "", "../../etc/passwd", "AD" * 16])
def test_a_user_is_named_by_their_hash(tmp_path: Path, user_hash: str) -> None:
    with pytest.raises(ConfigError, match="hash of a user"):
        forget_user(tmp_path, user_hash)


@given(
    users=st.lists(st.sampled_from([ADA, BOB]), min_size=1, max_size=12),
    shipped=st.integers(0, 12),
    cut=st.integers(0, 11),
)
def test_exactly_what_others_had_waiting_is_still_waiting(
    tmp_path_factory: pytest.TempPathFactory, users: list[str], shipped: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    records = [record(n, user) for n, user in enumerate(users)]
    first, second = records[:cut], records[cut:]
    write(folder, first, second)
    shipped = min(shipped, len(records))
    segment, before = (1, first[:shipped]) if shipped <= len(first) else (2, records[cut:shipped])
    store_cursor(folder, Cursor(Position(segment, sum(len(pack(r)) for r in before)), IDS))
    forget_user(folder, ADA)

    waiting = [f"k{n}" for n, user in enumerate(users) if user == BOB and n >= shipped]
    assert read(folder) == waiting


def test_a_crash_between_two_steps_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [record(0, ADA), record(1, BOB), record(2, BOB)]
    write(tmp_path, records)
    cursor = Cursor(Position(1, len(pack(records[0])) + len(pack(records[1]))), IDS)
    store_cursor(tmp_path, cursor)
    end = segment_path(tmp_path, 1).stat().st_size
    real = forgetting_module._rewrite
    for at in ("before", "after"):

        def crash(path: Path, data: bytes, at: str = at) -> None:
            if at == "after":
                real(path, data)
            raise KeyboardInterrupt

        monkeypatch.setattr(forgetting_module, "_rewrite", crash)
        with pytest.raises(KeyboardInterrupt):
            forget_in_segment(tmp_path, 1, end=end, person=Person(user_hash=ADA), cursor=cursor)
        found = load_cursor(tmp_path)
        assert found is not None
        assert found.position == Position(1, 0)
        assert "k2" in read(tmp_path)


@pytest.mark.parametrize("reader", ["gateway", "erasure"])
def test_file_of_a_killed_rewrite_is_no_segment_and_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    write(tmp_path, [record(0, ADA), record(1, BOB)])
    end = segment_path(tmp_path, 1).stat().st_size

    def kill(_: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", kill)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            forgetting_module._rewrite(segment_path(tmp_path, 1), pack(record(1, BOB)))
    (left,) = tmp_path.glob("*.tmp")
    assert segment_numbers(tmp_path) == [1]
    assert segment_path(tmp_path, 1).stat().st_size == end

    if reader == "gateway":
        assert read(tmp_path) == ["k0", "k1"]
    else:
        assert forget_user(tmp_path, BOB) == 1
    assert not left.exists()
    assert segment_numbers(tmp_path) == [1]


class Line:
    """A running spool with its shipper."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.spool = open_spool(folder, **config)
        self.log = MemoryWriter()
        self.shipper = Shipper(
            self.spool,
            connect=self.log.connect,
            config=SpoolConfig(topic_poll_s=0.02, ship_batch=2),
            metrics=GatewayMetrics(CollectorRegistry()),
        )
        self.shipper.start()

    def put(self, *records: Record) -> None:
        for item in records:
            stored = threading.Event()
            self.spool.put(item, on_stored=stored.set)
            assert stored.wait(60)

    @property
    def shipped(self) -> list[str]:
        return [item.key for item in self.log.records]


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr(shipper_module, "_MIN_BACKOFF_S", 0.01)
    monkeypatch.setattr(shipper_module, "_MAX_BACKOFF_S", 0.02)
    line = Line(tmp_path)
    yield line
    line.log.away = False
    line.shipper.close(drain_s=5)
    line.spool.close(timeout_s=5)


def wait_for(line: Line, *shipped: str) -> None:
    deadline = time.monotonic() + 60
    while line.shipped != list(shipped):
        assert time.monotonic() < deadline, line.shipped
        time.sleep(0.005)


def test_a_running_gateway_forgets_when_it_is_asked(line: Line) -> None:
    line.put(record(1, ADA), record(2, BOB))
    wait_for(line, "k1", "k2")

    assert forget_user(line.folder, ADA, timeout_s=10) == 1
    assert b"k1" not in on_disk(line.folder)
    line.put(record(3, ADA), record(4, BOB))
    wait_for(line, "k1", "k2", "k3", "k4")
    line.log.come_back_empty()
    wait_for(line, "k2", "k3", "k4")


def test_a_running_gateway_forgets_whole_sessions_and_minds_no_broken_request(line: Line) -> None:
    (line.folder / "forget").mkdir()
    (line.folder / "forget" / f"{BOB}.ask").write_bytes(b"[]")
    line.put(*in_sessions())
    wait_for(line, "k1", "k2", "k3", "k4", "k5")

    names = ["s-ada", "i-ada"]
    assert forget_user(line.folder, ADA, tenant="acme", names=names, timeout_s=10) == 3
    line.log.come_back_empty()
    wait_for(line, "k2", "k4")


def test_a_running_gateway_forgets_while_the_log_is_away(line: Line) -> None:
    line.put(record(1, BOB))
    wait_for(line, "k1")
    line.log.away = True
    line.put(*(record(n, ADA if n % 3 == 0 else BOB) for n in range(2, 10)))

    assert forget_user(line.folder, ADA, timeout_s=10) == 3
    waiting = line.spool.num_waiting
    line.log.away = False
    wait_for(line, "k1", *(f"k{n}" for n in range(2, 10) if n % 3))
    assert waiting == 5
    assert line.spool.is_drained
    assert list((line.folder / "forget").iterdir()) == []


def test_what_a_running_gateway_cannot_do_in_time_is_told_and_done_later(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.put(record(1, ADA))
    wait_for(line, "k1")

    def fail(_: Person) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(line.spool, "forget", fail)
        with pytest.raises(ServiceUnavailable, match="as soon as its disk"):
            forget_user(line.folder, ADA, timeout_s=0.3)

    deadline = time.monotonic() + 60
    while b"k1" in on_disk(line.folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_old_answer_is_not_taken_for_a_new_one(line: Line) -> None:
    folder = line.folder / "forget"
    folder.mkdir()
    (folder / f"{ADA}.done").write_text("0123456789abcdef 7")
    line.put(record(1, ADA))
    wait_for(line, "k1")

    assert forget_user(line.folder, ADA, timeout_s=10) == 1


def test_a_running_gateway_minds_no_request_that_it_cannot_read_yet(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    unread = line.folder / "forget" / f"{'0' * 32}.ask"
    unread.mkdir(parents=True)  # an OSError for every reader, root too
    line.put(record(1, ADA), record(2, "0" * 32))
    wait_for(line, "k1", "k2")
    others = forget_user(line.folder, ADA, timeout_s=10)
    num_warnings = caplog.text.count(unread.name)
    unread.rmdir()

    assert (others, num_warnings) == (1, 1)
    assert forget_user(line.folder, "0" * 32, timeout_s=10) == 1
    line.put(record(3, BOB))
    wait_for(line, "k1", "k2", "k3")
