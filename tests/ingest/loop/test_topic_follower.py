"""Rebalances, full buffers, storage that fails, and clocks that go back."""

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onlinerl.errors import CommitStuck, ServiceUnavailable, StoreConflict
from onlinerl.ingest.batches.sorting import ROUTES, Route
from onlinerl.ingest.committing.writer import TableWriter
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import LogRecord, MemoryLog, Partition, PollResult
from onlinerl.ingest.loop.ingester import Ingester
from onlinerl.rollout_store.event_log import ALL_TOPICS
from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from tests.events import NOON, interaction
from tests.ingest.world import World, make_world

ALL = frozenset((topic, number) for topic in ALL_TOPICS for number in range(2))
FIRST = frozenset((topic, 0) for topic in ALL_TOPICS)
GROUP: dict[str, Any] = {"mode": "group", "max_batch_rows": 3, "check_interval_s": 0.001}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, partitions=2)


def run(world: World, writer: TableWriter, **config: Any) -> None:
    """Run one process to the end of its log."""
    settings = IngestConfig.model_validate({"max_backoff_s": 0.01} | config)
    Ingester(lambda: world.log, writer=writer, config=settings).run(threading.Event(), once=True)


def fill(world: World, count: int) -> dict[object, int]:
    for number in range(count):
        world.send(interaction(f"i{number}"), partition=number % 2)
    return {f"i{n}": 1 for n in range(count)}


class EventfulLog(MemoryLog):
    """Calls `happens` right after the n-th poll that returned records."""

    def __init__(self, *, after: int, happens: Callable[["EventfulLog"], None]) -> None:
        super().__init__(ALL_TOPICS, partitions=2, max_poll_records=2)
        self.left = after
        self.happens = happens

    def poll(self, timeout_s: float) -> PollResult:
        fetched = super().poll(timeout_s)
        self.left -= bool(fetched.records)
        if fetched.records and self.left == 0:
            self.happens(self)
        return fetched


@pytest.mark.parametrize("max_batch_rows", [3, 1000], ids=["written at once", "still held"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_records_of_partitions_that_were_taken_away_are_dropped_and_read_by_their_new_reader(
    world: World, after: int, max_batch_rows: int
) -> None:
    other = world.writer(exclusive=False)
    other.claim()

    def second_takes_partition_1(log: EventfulLog) -> None:
        part = (INTERACTIONS_TOPIC, 1)
        while True:
            positions = other.align(log.topics(), ALL - FIRST)
            try:
                other.write(ROUTES[0], log._logs[part].records[positions[part] :])
                break
            except StoreConflict:
                continue  # the first one, which does not know yet, was quicker
        log.reassign(FIRST)

    world.log = EventfulLog(after=after, happens=second_takes_partition_1)
    expected = fill(world, 16)
    config = GROUP | {"max_batch_rows": max_batch_rows, "max_batch_age_s": 3600}
    run(world, world.writer(exclusive=False), **config)

    assert world.counts("interactions", "interaction_id") == expected


def test_new_partitions_are_read_from_where_the_tables_end(world: World) -> None:
    other = world.writer(exclusive=False)
    other.claim()
    expected = fill(world, 6)
    positions = other.align(world.log.topics(), ALL - FIRST)
    other.write(ROUTES[0], world.log._logs[INTERACTIONS_TOPIC, 1].records[:2])

    def gets_the_rest(log: EventfulLog) -> None:
        log.reassign(ALL)

    records = dict(world.log._logs)
    log = EventfulLog(after=1, happens=gets_the_rest)
    log._topics, log._logs = world.log._topics, records
    log.open = lambda topics: log.reassign(FIRST)  # type: ignore[method-assign]
    world.log = log
    run(world, world.writer(exclusive=False), **GROUP)

    assert positions == {(INTERACTIONS_TOPIC, 1): 0, ("onlinerl.feedback", 1): 0}
    assert world.counts("interactions", "interaction_id") == expected


def test_a_batch_that_another_process_stored_already_is_dropped_and_reading_goes_on(
    world: World,
) -> None:
    """A member that lost a partition commits what it read although it was told too late."""
    zombie = world.writer(exclusive=False)
    zombie.claim()

    def zombie_commits(log: EventfulLog) -> None:
        zombie.align(log.topics(), ALL)
        zombie.write(ROUTES[0], log._logs[INTERACTIONS_TOPIC, 0].records[:3])

    world.log = EventfulLog(after=1, happens=zombie_commits)
    expected = fill(world, 12)
    run(world, world.writer(exclusive=False), **GROUP)

    assert world.counts("interactions", "interaction_id") == expected


def test_two_readers_of_a_truncated_topic_lose_no_records(world: World) -> None:
    fill(world, 4)
    world.send_raw(b"poison before")
    world.ingest()
    zombie = world.writer(exclusive=False)
    zombie.claim()
    part = (INTERACTIONS_TOPIC, 0)

    class Cut(MemoryLog):
        is_told = False

        def poll(self, timeout_s: float) -> PollResult:
            fetched = super().poll(timeout_s)
            if fetched.restarted and not self.is_told:
                self.is_told = True
                zombie.align(self.topics(), ALL)
                zombie.restart([part])
            return fetched

    log = Cut(ALL_TOPICS, partitions=2)
    log._topics, log._logs = world.log._topics, world.log._logs
    world.log = log
    log.truncate(INTERACTIONS_TOPIC, 2)
    world.send_raw(b"poison after")
    writer = CountingWriter(world)
    run(world, writer, **GROUP)

    assert writer.num_late == 1
    assert world.counts("interactions", "interaction_id") == {f"i{n}": 1 for n in range(4)}
    assert world.column("dead_letters", "payload") == [b"poison after", b"poison before"]


class CountingWriter(TableWriter):
    """Counts the conflicts with another writer."""

    def __init__(self, world: World) -> None:
        super().__init__(world.store, recent_ids=100, now=lambda: NOON, exclusive=False)
        self.num_late = 0

    def write(self, route: Route, records: Sequence[LogRecord]) -> None:
        try:
            super().write(route, records)
        except StoreConflict:
            self.num_late += 1
            raise

    def restart(self, partitions: Iterable[Partition]) -> None:
        try:
            super().restart(partitions)
        except StoreConflict:
            self.num_late += 1
            raise


def test_dropped_records_are_read_again(world: World) -> None:
    zombie, writer = world.writer(exclusive=False), CountingWriter(world)
    zombie.claim()

    def zombie_commits(log: EventfulLog) -> None:
        zombie.align(log.topics(), ALL)
        zombie.write(ROUTES[0], log._logs[INTERACTIONS_TOPIC, 0].records[:1])

    class Waits(EventfulLog):
        def poll(self, timeout_s: float) -> PollResult:
            quiet = self.left <= 0 and not writer.num_late
            return PollResult() if quiet else super().poll(timeout_s)

    world.log = Waits(after=1, happens=zombie_commits)
    expected = fill(world, 12)
    run(world, writer, **GROUP)

    assert writer.num_late == 1
    assert world.counts("interactions", "interaction_id") == expected


def test_without_a_group_a_conflict_ends_the_process(world: World) -> None:
    newer = world.writer()
    world.log = EventfulLog(after=2, happens=lambda log: newer.claim())
    fill(world, 12)

    with pytest.raises(StoreConflict, match="another writer"):
        run(world, world.writer(), max_batch_rows=3)
    assert max(world.counts("interactions", "interaction_id").values(), default=1) == 1


class SlowWriter(TableWriter):
    """Waits for `gate` before it writes."""

    gate: threading.Event
    num_bytes = 0

    def write(self, route: Route, records: Sequence[LogRecord]) -> None:
        self.gate.wait(30)
        super().write(route, records)
        self.num_bytes += sum(len(record.value) for record in records)


class WatchedLog(MemoryLog):
    """Measures how many bytes the reader holds; lets it write after some polls in a pause."""

    def __init__(self, writer: SlowWriter, *, open_after: int) -> None:
        super().__init__(ALL_TOPICS, partitions=2, max_poll_records=1)
        self.writer = writer
        self.left = open_after
        self.delivered = 0
        self.most_held = 0

    def poll(self, timeout_s: float) -> PollResult:
        self.left -= self.paused
        if self.left <= 0:
            self.writer.gate.set()
        fetched = super().poll(timeout_s)
        self.delivered += sum(len(record.value) for record in fetched.records)
        self.most_held = max(self.most_held, self.delivered - self.writer.num_bytes)
        return fetched


def test_partitions_are_paused_while_the_buffers_are_full(world: World) -> None:
    writer = SlowWriter(world.store, recent_ids=100, now=lambda: NOON)
    writer.gate = threading.Event()
    log = WatchedLog(writer, open_after=5)
    world.log = log
    expected = fill(world, 60)
    size = len(log._logs[INTERACTIONS_TOPIC, 0].records[0].value)
    bound = 10 * size
    run(
        world,
        writer,
        max_batch_rows=2,
        max_buffered_bytes=bound,
        max_batch_bytes=bound,
        poll_timeout_s=0.01,
    )

    assert log.left <= 0, "it was never paused"
    assert log.most_held <= bound + 2 * size
    assert world.counts("interactions", "interaction_id") == expected


def test_a_commit_that_does_not_end_ends_the_process(world: World) -> None:
    writer = SlowWriter(world.store, recent_ids=100, now=lambda: NOON)
    writer.gate = threading.Event()
    fill(world, 2)

    with pytest.raises(CommitStuck, match="max_commit_s"):
        run(world, writer, max_commit_s=0.05)
    writer.gate.set()


class FailingStore(DeltaStore):
    """A disk that is full in some commits of rows, before or after the rows were stored."""

    failures: list[str]

    def append(
        self, table: str, rows: pa.Table, *, transactions: Sequence[Transaction] = ()
    ) -> int:
        failure = self.failures.pop(0) if rows.num_rows and self.failures else ""
        if failure == "before":
            raise ServiceUnavailable("No space left on device")
        version = super().append(table, rows, transactions=transactions)
        if failure == "after":
            raise ServiceUnavailable("the answer was lost")
        return version


@pytest.mark.parametrize(
    "failures",
    [["before"] * 3, ["after"] * 3, ["", "before", "after", "before"]],
    ids=["full", "answers lost", "mixed"],
)
def test_a_disk_that_was_full_loses_and_doubles_nothing(world: World, failures: list[str]) -> None:
    expected = fill(world, 12)
    world.send_raw(b"poison")
    store = FailingStore(world.store.root)
    store.failures = list(failures)
    world.store = store
    stop = threading.Event()
    config = IngestConfig(max_batch_rows=2, max_backoff_s=0.001, max_batch_age_s=0.001)
    log = world.log

    class Ends(MemoryLog):
        def poll(self, timeout_s: float) -> PollResult:
            fetched = log.poll(timeout_s)
            stored = world.counts("interactions", "interaction_id")
            if not fetched.records and stored == expected:
                stop.set()
            return fetched

    ends = Ends(ALL_TOPICS)
    for name in ("topics", "open", "seek", "pause", "resume", "lags", "close"):
        setattr(ends, name, getattr(log, name))
    Ingester(lambda: ends, writer=world.writer(), config=config).run(stop)

    assert world.counts("interactions", "interaction_id") == expected
    assert world.counts("dead_letters", "payload") == {b"poison": 1}


def test_a_clock_that_goes_back_stands_still_for_one_process(world: World) -> None:
    times = iter([NOON, NOON - timedelta(days=1), NOON - timedelta(hours=1)])
    last = [NOON]

    def now() -> datetime:
        last[0] = next(times, last[0])
        return last[0]

    world.now = now
    expected = fill(world, 9)
    run(world, world.writer(), max_batch_rows=2, max_batch_bytes=1024, max_buffered_bytes=1024)

    assert world.counts("interactions", "interaction_id") == expected
    assert set(world.column("interactions", "ingested_at")) == {NOON}


def test_after_a_restart_with_an_earlier_clock_nothing_is_lost_or_doubled(world: World) -> None:
    fill(world, 4)
    world.ingest()
    yesterday = NOON - timedelta(days=1)
    world.now = lambda: yesterday
    world.send(interaction("i3"))
    world.send(interaction("new"))
    world.ingest()
    world.send(interaction("new"))
    world.send(interaction("i0"))
    world.ingest()

    assert world.counts("interactions", "interaction_id") == {f"i{n}": 1 for n in range(4)} | {
        "new": 1
    }
    assert set(world.column("interactions", "ingest_date")) == {NOON.date(), yesterday.date()}
