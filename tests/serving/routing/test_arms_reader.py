import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from onlinerl.deploy.promotion.arms import champion_only, write_arms
from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.schema import ArmRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.serving.config import ArmsConfig
from onlinerl.serving.observability.routing_metrics import RoutingMetrics
from onlinerl.serving.routing.arms import Arms
from onlinerl.serving.routing.arms_reader import ArmsReader, arms_in
from tests.serving.routing.test_arms import row

pytestmark = pytest.mark.asyncio


class Table:
    """Rows that a test changes, and a store that fails or hangs when told to."""

    def __init__(self) -> None:
        self.rows: Sequence[ArmRow] = [row("d1", "canary", 13)]
        self.fault: Exception | None = None
        self.held = threading.Event()
        self.held.set()
        self.num_reads = 0

    def __call__(self) -> Sequence[ArmRow]:
        self.num_reads += 1
        self.held.wait(10)
        if self.fault is not None:
            raise self.fault
        return self.rows


class World:
    def __init__(self, table: Table) -> None:
        self.table = table
        self.registry = CollectorRegistry()
        self.applied: list[Arms] = []
        self.reader = ArmsReader(
            table,
            policy="assistant",
            config=ArmsConfig(poll_s=0.01, timeout_s=0.05),
            apply=self.applied.append,
            metrics=RoutingMetrics(self.registry),
        )

    @property
    def num_faults(self) -> float:
        name = "onlinerl_gateway_routing_faults_total"
        return self.registry.get_sample_value(name, {"loop": "arms"}) or 0.0

    def reads(self, outcome: str) -> float:
        name = "onlinerl_gateway_arms_reads_total"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World(Table())
    yield world
    world.table.held.set()
    await world.reader.close()


async def test_what_was_decided_is_applied_once(world: World) -> None:
    await world.reader.look()
    await world.reader.look()

    assert [arms.canary and arms.canary.version for arms in world.applied] == [13]
    assert world.reads("ok") == 2


async def test_the_last_known_arms_hold_while_the_table_cannot_be_read(world: World) -> None:
    await world.reader.look()
    world.table.fault = ServiceUnavailable("the store is away")
    await world.reader.look()
    await world.reader.look()
    world.table.fault, world.table.rows = None, []
    await world.reader.look()

    assert world.reads("failed") == 2
    assert world.num_faults == 0
    assert [arms.canary is None for arms in world.applied] == [False, True]


async def test_a_row_that_cannot_be_understood_changes_nothing(world: World) -> None:
    await world.reader.look()
    world.table.fault = ValueError("no such arm")
    await world.reader.look()

    assert len(world.applied) == 1
    assert world.reads("failed") == 1
    assert world.num_faults == 1


async def test_a_fault_in_applying_arms_is_counted_and_does_not_end_the_reading() -> None:
    faults = [RuntimeError("a bug")]
    world = World(Table())

    def apply(arms: Arms) -> None:
        world.applied.append(arms)
        if world.num_faults == 0:
            raise faults[0]

    await world.reader.start()
    world.reader._apply = apply
    world.table.rows = [row("d2", "canary", 14, minute=1)]
    async with asyncio.timeout(60):
        while world.num_faults == 0:
            await asyncio.sleep(0.005)
        world.table.rows = [row("d3", "canary", 15, minute=2)]
        while world.applied[-1].canary is None or world.applied[-1].canary.version != 15:
            await asyncio.sleep(0.005)
    await world.reader.close()

    assert world.num_faults == 1


async def test_a_store_that_hangs_is_waited_for_once_and_holds_up_nobody(world: World) -> None:
    world.table.held.clear()
    await world.reader.look()
    await world.reader.look()
    reads_while_it_hung = world.table.num_reads
    world.table.held.set()
    async with asyncio.timeout(60):
        while not world.applied:
            await world.reader.look()

    assert world.reads("late") >= 2
    assert reads_while_it_hung == 1


async def test_changes_are_found_while_it_runs(world: World) -> None:
    await world.reader.start()
    world.table.rows = [row("d2", "canary", 14, minute=1)]
    async with asyncio.timeout(60):
        while len(world.applied) < 2:
            await asyncio.sleep(0.005)

    assert [arms.canary and arms.canary.version for arms in world.applied] == [13, 14]


async def test_a_store_without_the_table_decides_nothing(tmp_path: Path) -> None:
    assert arms_in(DeltaStore(str(tmp_path)))() == []


async def test_decisions_of_the_controller_are_read_as_they_were_written(tmp_path: Path) -> None:
    store = DeltaStore(str(tmp_path))
    store.create()
    decided_at = datetime(2026, 1, 1, tzinfo=UTC)
    source = arms_in(store)
    write_arms(store, champion_only("assistant", 12, reason="test", decided_at=decided_at))
    first, unchanged = source(), source()
    write_arms(
        store,
        [
            row("d2", "canary", 13, minute=1, share=0.25),
            row("d2", "shadow", 14, minute=1, share=0.5, adapter="assistant@14"),
        ],
    )
    rows = source()

    assert first is unchanged
    assert [each.arm for each in first] == ["champion"]
    assert {(each.arm, each.version, each.share, each.adapter) for each in rows} == {
        ("champion", 12, 1.0, None),
        ("canary", 13, 0.25, None),
        ("shadow", 14, 0.5, "assistant@14"),
    }
    assert all(each.decided_at.tzinfo is not None for each in rows)
