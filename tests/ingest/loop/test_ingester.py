import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onlinerl.errors import ServiceUnavailable, StoreConflict
from onlinerl.ingest.batches.sorting import ROUTES
from onlinerl.ingest.committing.writer import STEPS, TableWriter
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import EventLog, LogRecord, MemoryLog, PollResult
from onlinerl.ingest.loop.ingester import Ingester
from onlinerl.rollout_store.event_log import ALL_TOPICS
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, INTERACTIONS_TOPIC
from tests.events import completion, feedback, interaction
from tests.ingest.world import Crash, World, make_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def test_events_become_rows(world: World) -> None:
    world.send(interaction("i1", choices=[completion(), completion([9], choice_index=1)]))
    world.send(feedback("f1"))

    world.ingest()

    assert world.counts("interactions", "interaction_id") == {"i1": 2}
    assert world.column("interactions", "choice_index") == [0, 1]
    assert world.column("feedback", "feedback_id") == ["f1"]


def test_reading_goes_on_where_the_last_process_stopped(world: World) -> None:
    world.send(interaction("i1"))
    world.ingest()
    world.send(interaction("i2"))
    world.ingest()
    world.ingest()

    assert world.column("interactions", "interaction_id") == ["i1", "i2"]


def test_an_event_that_is_shipped_again_is_stored_once(world: World) -> None:
    for _ in range(2):
        world.send(interaction("i1"))
        world.send(feedback("f1"))
    world.ingest()
    world.send(interaction("i1"))
    world.send(feedback("f1"))
    world.ingest()

    assert world.column("interactions", "interaction_id") == ["i1"]
    assert world.column("feedback", "feedback_id") == ["f1"]


def test_one_tenant_cannot_take_a_feedback_id_from_another(world: World) -> None:
    world.send(feedback("f1", tenant="acme"))
    world.send(feedback("f1", tenant="globex"))
    world.ingest()

    assert world.column("feedback", "tenant") == ["acme", "globex"]


def test_a_broken_record_is_kept_and_the_partition_goes_on(world: World) -> None:
    world.send(interaction("i1"))
    world.send_raw(b"\xff{not json")
    world.send(interaction("i2"))
    world.ingest()
    world.ingest()

    assert world.column("interactions", "interaction_id") == ["i1", "i2"]
    assert world.column("dead_letters", "payload") == [b"\xff{not json"]
    assert world.column("dead_letters", "offset") == [1]


def test_a_value_that_no_column_holds_is_a_dead_letter_and_spares_its_batch(world: World) -> None:
    world.send(interaction("i1"))
    world.send(interaction("i2", sampling={"seed": 2**70}))
    world.send(interaction("i3"))
    world.ingest()

    assert world.column("interactions", "interaction_id") == ["i1", "i3"]
    assert world.column("dead_letters", "offset") == [1]


def test_a_batch_of_broken_records_only_moves_on(world: World) -> None:
    for _ in range(7):
        world.send_raw(b"{}")
    world.ingest()
    world.ingest()

    assert world.column("dead_letters", "offset") == list(range(7))


def test_an_event_without_consent_is_not_stored_anywhere(world: World) -> None:
    world.send(interaction("i1", consent="none"))
    world.ingest()

    assert world.column("interactions", "interaction_id") == []
    assert world.column("dead_letters", "offset") == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("visit", [1, 2, 3])
def test_a_crash_at_any_step_loses_and_doubles_nothing(world: World, step: str, visit: int) -> None:
    for number in range(8):
        world.send(interaction(f"i{number}"))
        world.send_raw(b"poison %d" % number)

    def crash_at_visit(at: str, left: list[int] = [visit]) -> None:  # noqa: B006 - a counter
        left[0] -= at == step
        if at == step and left[0] == 0:
            raise Crash

    with pytest.raises(Crash):
        world.ingest(crash_at_visit)
    world.ingest()

    assert world.counts("interactions", "interaction_id") == {f"i{n}": 1 for n in range(8)}
    assert world.counts("dead_letters", "offset") == {2 * n + 1: 1 for n in range(8)}


def test_an_empty_log_under_a_new_id_is_read_from_its_start(world: World) -> None:
    for number in range(5):
        world.send(interaction(f"old{number}"))
    world.ingest()
    world.log.recreate()
    for number in range(2):
        world.send(interaction(f"new{number}"))
    world.ingest()

    expected = [f"new{n}" for n in range(2)] + [f"old{n}" for n in range(5)]
    assert world.column("interactions", "interaction_id") == expected


def test_a_new_log_longer_than_the_old_offset_is_read_from_its_start_too(world: World) -> None:
    world.send(interaction("i0"))
    world.send(interaction("i1"))
    world.ingest()
    world.log.recreate()
    for number in reversed(range(6)):
        world.send(interaction(f"i{number}"))
    world.ingest()

    assert world.column("interactions", "interaction_id") == [f"i{n}" for n in range(6)]


class RecreatingLog(MemoryLog):
    """Is created anew between a poll and its check, and is then longer than before."""

    recreated = False

    def poll(self, timeout_s: float) -> PollResult:
        fetched = super().poll(timeout_s)
        if fetched.records and not self.recreated:
            self.recreated = True
            self.recreate()
            for number in range(9):
                event = interaction(f"new{number}")
                self.produce(INTERACTIONS_TOPIC, event.model_dump_json().encode())
        return fetched


def test_records_polled_while_the_log_changed_are_not_stored_under_either_id(
    tmp_path: Path,
) -> None:
    world = make_world(tmp_path)
    world.log = RecreatingLog(ALL_TOPICS)
    world.send(interaction("old"))
    world.ingest()

    assert world.column("interactions", "interaction_id") == [f"new{n}" for n in range(9)]


def test_retention_that_overtook_ingest_skips_what_is_gone_and_goes_on(world: World) -> None:
    for number in range(6):
        world.send(interaction(f"i{number}"))
    world.log.expire(INTERACTIONS_TOPIC, 4)
    world.ingest()

    assert world.column("interactions", "interaction_id") == ["i4", "i5"]


def test_a_log_cut_at_its_end_is_read_again_without_doubling(world: World) -> None:
    for number in range(3):
        world.send(interaction(f"i{number}"))
    world.send_raw(b"poison before")
    world.ingest()
    world.log.truncate(INTERACTIONS_TOPIC, 3)
    world.send(interaction("i9"))
    world.send_raw(b"poison after")
    world.ingest()

    assert world.column("interactions", "interaction_id") == ["i0", "i1", "i2", "i9"]
    assert world.column("dead_letters", "payload") == [b"poison after", b"poison before"]


def test_a_broken_record_after_a_cut_is_kept_by_a_later_process_too(world: World) -> None:
    """The broken record is below the offset up to which dead letters were stored before the cut."""
    for number in range(8):
        world.send(interaction(f"i{number}"))
    world.send_raw(b"poison before")
    world.ingest()
    world.log.truncate(INTERACTIONS_TOPIC, 6)
    world.send(interaction("i8"))
    world.ingest()
    world.send_raw(b"poison after")
    world.ingest()

    assert world.counts("interactions", "interaction_id") == {f"i{n}": 1 for n in range(9)}
    assert world.column("dead_letters", "payload") == [b"poison after", b"poison before"]
    assert world.column("dead_letters", "offset") == [4, 8]


def test_the_newer_of_two_writers_fences_the_older(world: World) -> None:
    world.send(interaction("i1"))
    older, newer = world.writer(), world.writer()
    older.claim()
    records = read_all(world, older)
    newer.claim()

    with pytest.raises(StoreConflict, match="another writer"):
        older.write(ROUTES[0], records)
    read_all(world, newer)
    newer.write(ROUTES[0], records)
    assert world.column("interactions", "interaction_id") == ["i1"]


def test_a_writer_whose_offset_moved_under_it_stores_nothing(world: World) -> None:
    world.send(interaction("i1"))
    world.send(interaction("i2"))
    writer = world.writer()
    writer.claim()
    records = read_all(world, writer)
    writer.write(ROUTES[0], records)
    stale = world.writer()
    stale.claim()
    read_all(world, stale)
    stale.write(ROUTES[0], [LogRecord(INTERACTIONS_TOPIC, 0, 5, None, b"poison")])

    with pytest.raises(StoreConflict):
        writer.write(ROUTES[0], records)
    assert world.column("interactions", "interaction_id") == ["i1", "i2"]


def read_all(world: World, writer: TableWriter) -> list[LogRecord]:
    topics = world.log.topics()
    world.log.open(topics)
    world.log.seek(writer.align(topics, world.log.poll(0).assigned or ()))
    return list(world.log.poll(0).records)


class UnreliableLog(MemoryLog):
    """Is unavailable for a number of polls, and has records before and after."""

    away = 0

    def poll(self, timeout_s: float) -> PollResult:
        if self.away:
            self.away -= 1
            raise ServiceUnavailable("the broker is away")
        return super().poll(timeout_s)


def test_ingest_waits_for_a_broker_and_is_not_ready_meanwhile(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    log = UnreliableLog(ALL_TOPICS)
    log.away = 3
    world.log = log
    world.send(interaction("i1"))
    stop, reasons = threading.Event(), []

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            reasons.append((ingester.ready(), timeout))
            return False

    stop = Waits()
    clock = iter(range(10**6))

    def open_log() -> EventLog:
        if len(reasons) == 3:
            stop_after_a_poll(log, stop)
        return log

    config = IngestConfig(max_backoff_s=0.15)
    ingester = Ingester(
        open_log, writer=world.writer(), config=config, clock=lambda: float(next(clock))
    )
    ingester.run(stop)

    assert reasons == [("the broker is away", wait_s) for wait_s in (0.1, 0.15, 0.15)]
    assert world.column("interactions", "interaction_id") == ["i1"]


class VanishingLog(MemoryLog):
    """Returns its records once and is unavailable from then on."""

    def poll(self, timeout_s: float) -> PollResult:
        fetched = super().poll(timeout_s)
        if not fetched.records and fetched.assigned is None:
            raise ServiceUnavailable("the broker is away")
        return fetched


def test_what_was_read_is_stored_although_the_broker_stays_away(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.log = VanishingLog(ALL_TOPICS)
    world.send(interaction("i1"))
    stop, opened = threading.Event(), iter([False, True])

    def open_log() -> EventLog:
        if next(opened):
            stop.set()
        return world.log

    config = IngestConfig(max_batch_age_s=3600.0, max_backoff_s=0.001)
    Ingester(open_log, writer=world.writer(), config=config).run(stop)

    assert world.column("interactions", "interaction_id") == ["i1"]


def stop_after_a_poll(log: UnreliableLog, stop: threading.Event) -> None:
    poll = log.poll

    def poll_and_stop(timeout_s: float) -> PollResult:
        fetched = poll(timeout_s)
        if fetched.records:
            stop.set()
        return fetched

    patched: Any = log
    patched.poll = poll_and_stop


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    crashes=st.lists(st.sampled_from(STEPS), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=3),
)
def test_any_order_repetition_crash_and_recreation_gives_the_same_tables(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], crashes: list[str], cuts: list[int]
) -> None:
    world = make_world(tmp_path_factory.mktemp("world"))
    faults = list(crashes)

    def fault(step: str) -> None:
        if faults and faults[0] == step:
            faults.pop(0)
            raise Crash

    def ingest_through_crashes() -> None:
        while True:
            try:
                return world.ingest(fault)
            except Crash:
                continue

    for at, number in enumerate(order):
        if at in cuts:
            ingest_through_crashes()
            world.log.recreate()
        world.send(interaction(f"i{number}"))
        world.send(feedback(f"f{number}", interaction_id=f"i{number}"))
    ingest_through_crashes()

    once = Counter({f"i{n}": 1 for n in set(order)})
    assert world.counts("interactions", "interaction_id") == once
    assert len(world.column("feedback", "feedback_id")) == len(once)


def test_several_partitions_share_one_commit_and_keep_their_own_offsets(tmp_path: Path) -> None:
    world = make_world(tmp_path, partitions=3)
    for number in range(9):
        world.send(interaction(f"i{number}"), partition=number % 3)
    world.ingest()
    world.send(interaction("i9"), partition=1)
    world.ingest()

    assert world.counts("interactions", "interaction_id") == {f"i{n}": 1 for n in range(10)}
    assert FEEDBACK_TOPIC in world.log.topics()
