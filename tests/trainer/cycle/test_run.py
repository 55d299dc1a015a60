"""A cycle with in-memory parts: what it plans, what it repeats, what it gives up."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from onlinerl.errors import LeaseHeld, ServiceUnavailable, TooFewRows, TrainingError, WeightsError
from onlinerl.registry.checkpoint import verify_checkpoint, write_manifest
from onlinerl.registry.memory_registry import MemoryRegistry
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.trainer.backend.protocol import MemoryBackend, TrainingBackend
from onlinerl.trainer.bookkeeping.database import Database
from onlinerl.trainer.bookkeeping.ledger import Cycle, Ledger
from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.cycle.parts import FAULTS, Parts
from onlinerl.trainer.cycle.run import run_cycle
from onlinerl.trainer.rollouts.rows import RowKey, WindowRow
from onlinerl.trainer.rollouts.segments import Segment
from onlinerl.trainer.rollouts.source import TableVersions
from onlinerl.trainer.rollouts.window import Candidate, WindowQuery
from onlinerl.trainer.tracking.protocol import MemoryTracker
from onlinerl.trainer.training.loop import History
from tests.trainer.builders import REWARDS, START, plan, row, segment


@dataclass
class MemorySource:
    """A RolloutSource over a list; its table version is the number of rows."""

    rows: list[WindowRow]
    served: list[int] = field(default_factory=lambda: [1])
    queries: list[WindowQuery] = field(default_factory=list)
    held: dict[str, TableVersions] = field(default_factory=dict)
    erased: str | None = None

    def hold(self, cycle_id: str, *, at: TableVersions) -> str | None:
        self.held[cycle_id] = at
        return self.erased

    def release(self, cycle_id: str) -> None:
        self.held.pop(cycle_id, None)

    def versions(self) -> dict[str, int]:
        return {"interactions": len(self.rows)}

    def served_versions(self, policy: str, *, at: TableVersions) -> list[int]:
        return self.served

    def candidates(
        self, query: WindowQuery, *, trained: Collection[RowKey], at: TableVersions
    ) -> list[Candidate]:
        self.queries.append(query)
        visible = self.rows[: at["interactions"]]
        return [
            Candidate(row=None, exclusion="already_trained")
            if item.key in set(trained)
            else Candidate(row=item, exclusion=None)
            for item in visible
        ]

    def segments(self, keys: Sequence[RowKey], *, at: TableVersions) -> Iterator[Segment]:
        visible = self.rows[: at["interactions"]]
        return (segment(item) for item in visible if item.key in set(keys))


def draw_nothing(folder: Path, *, plan: Plan, history: History, title: str) -> None:
    folder.mkdir()


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_at(point: str) -> Callable[[str], None]:
    def fault(here: str) -> None:
        if here == point:
            raise Killed

    return fault


@dataclass
class World:
    """Everything outside the cycle, kept over its deaths."""

    folder: Path
    source: MemorySource
    registry: MemoryRegistry
    tracker: MemoryTracker
    database: Database
    backends: list[MemoryBackend] = field(default_factory=list)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.database)

    def parts(self, **changes: object) -> Parts:
        def open_backend(parent: Path, *, plan: Plan) -> TrainingBackend:
            assert (parent / "model.safetensors").exists()
            self.backends.append(MemoryBackend())
            return self.backends[-1]

        parts = Parts(
            policy="assistant",
            base_model="base",
            config=TrainerConfig(min_labelled_rows=4, tokens_per_step=6),
            rewards=REWARDS,
            folder=self.folder / "trainer",
            ledger=self.ledger,
            source=self.source,
            registry=self.registry,
            tracker=self.tracker,
            open_backend=open_backend,
            draw_figures=draw_nothing,
            now=lambda: START,
        )
        return replace(parts, **changes)  # type: ignore[arg-type]

    def run(self, **changes: object) -> Cycle:
        with self.lease() as lease:
            return run_cycle(self.parts(**changes), lease=lease)

    def lease(self, **changes: object) -> Lease:
        store = DeltaStore(str(self.folder / "store"))
        store.create()
        return Lease(store, name="train", ttl_s=60.0, **changes)  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> World:
    first = tmp_path / "v1"
    first.mkdir()
    (first / "model.safetensors").write_bytes(b"base")
    write_manifest(first, policy="assistant", cycle="bootstrap", parent_version=0)
    tracker = MemoryTracker(tmp_path / "runs")
    registry = MemoryRegistry(tracker.artifacts)
    registry.add(first, candidate=False)
    registry.aliases["champion"] = 1
    rows = [row(n, reward=1.0 if n % 3 else -1.0) for n in range(12)]
    database = Database(tmp_path / "ledger.sqlite")
    return World(tmp_path, MemorySource(rows), registry, tracker, database)


def test_a_cycle_registers_a_candidate_with_its_lineage(world: World) -> None:
    cycle = world.run()

    version = world.registry.version(2)
    assert version is not None
    folder = world.registry.folders[2]
    assert cycle.status == "registered"
    assert cycle.version == world.registry.aliases["candidate"] == 2
    assert version.tags == {
        "cycle": "assistant-c00001-20261101t120000",
        "parent_version": "1",
        "window_start": "2026-11-01T12:00:00+00:00",
        "window_end": "2026-11-01T12:00:11+00:00",
        "review": "pending",
    }
    assert verify_checkpoint(folder).cycle == cycle.cycle_id
    lineage = pq.read_table(folder.parent / "lineage" / "interactions.parquet").to_pylist()
    assert [item["interaction_id"] for item in lineage] == [
        r.interaction_id for r in cycle.plan.rows
    ]
    config = json.loads((folder.parent / "config" / "config.json").read_text())
    assert config["trainer"]["loss"] == "tis"
    (run,) = world.tracker.runs.values()
    assert run.status == "FINISHED"
    assert [step for step, _ in run.metrics["ratio/k3"]] == [0, 1, 2, 3]
    (mean,) = run.metrics["window/reward_mean"]
    assert mean == pytest.approx((0, 1 / 3))


@pytest.mark.parametrize("point", FAULTS)
def test_a_cycle_that_dies_is_repeated_with_the_same_window_and_seed(
    world: World, point: str
) -> None:
    with pytest.raises(Killed):
        world.run(fault=killed_at(point))
    before = world.ledger.cycle(1)
    assert before.status in ("planned", "trained")
    assert world.ledger.trained_rows() == []
    # More rows and other settings must not change what is repeated.
    world.source.rows.append(row(50, reward=1.0))
    other = TrainerConfig(min_labelled_rows=1, tokens_per_step=1, seed=9)

    after = world.run(config=other)

    assert after.plan == before.plan
    assert after.attempts == before.attempts + (before.status == "planned")
    assert world.ledger.count() == 1
    assert sorted(world.ledger.trained_rows()) == sorted(before.plan.keys)
    assert list(world.registry.folders) == [1, 2]
    assert world.registry.aliases["candidate"] == 2
    statuses = [run.status for run in world.tracker.runs.values()]
    assert statuses.count("FINISHED") == 1
    assert "RUNNING" not in statuses
    trained = [backend for backend in world.backends if len(backend.steps) == 4]
    assert all(backend.seen == trained[0].seen for backend in trained)


def test_two_deaths_in_a_row_still_give_one_version(world: World) -> None:
    for point in ("version_created", "candidate_set"):
        with pytest.raises(Killed):
            world.run(fault=killed_at(point))

    assert world.run().version == 2
    assert list(world.registry.folders) == [1, 2]


def test_a_version_that_was_judged_meanwhile_is_not_offered_again(world: World) -> None:
    with pytest.raises(Killed):
        world.run(fault=killed_at("candidate_set"))
    world.registry.tags[2]["verdict"] = "promoted"
    world.registry.aliases["champion"] = 2
    del world.registry.aliases["candidate"]

    assert world.run().version == 2
    assert "candidate" not in world.registry.aliases


def test_the_rows_of_a_window_are_held_while_the_cycle_runs(world: World) -> None:
    seen: list[dict[str, int]] = []

    def look(here: str) -> None:
        if here == "outcome_written":
            seen.extend(dict(at) for at in world.source.held.values())

    cycle = world.run(fault=look)

    assert seen == [cycle.plan.table_versions]
    assert world.source.held == {}


def test_a_cycle_that_died_is_held_until_its_repeat_is_done(world: World) -> None:
    with pytest.raises(Killed):
        world.run(fault=killed_at("first_step"))
    cycle = world.ledger.unfinished("assistant")
    assert cycle is not None
    assert list(world.source.held) == [cycle.cycle_id]

    world.run()

    assert world.source.held == {}


def test_a_window_with_erased_rows_is_given_up_and_chosen_anew(world: World) -> None:
    with pytest.raises(Killed):
        world.run(fault=killed_at("first_step"))
    world.source.erased = "rows in it were erased by e1"

    with pytest.raises(TrainingError, match="cannot be read any more: rows in it were erased"):
        world.run()
    world.source.erased = None
    again = world.run()

    assert again.number == 2
    assert world.ledger.cycle(1).status == "failed"
    assert world.source.held == {}


def test_the_next_cycle_learns_only_from_new_rows(world: World) -> None:
    world.run()
    world.source.rows += [row(n, reward=float(n % 2)) for n in range(20, 26)]

    cycle = world.run()

    assert {item.interaction_id for item in cycle.plan.rows} == {f"i{n:04d}" for n in range(20, 26)}
    assert cycle.plan.baselines.keys() == {"acme"}
    assert cycle.plan.seed == 1


def test_too_few_rows_leave_no_trace(world: World) -> None:
    world.source.rows = world.source.rows[:3]

    with pytest.raises(TooFewRows):
        world.run()
    assert world.ledger.count() == 0
    assert world.tracker.runs == {}


def test_a_window_without_a_signal_fails_and_frees_its_rows(world: World) -> None:
    # Sessions of reward 0 against a baseline of 0.
    world.source.rows = [row(n, reward=0.0) for n in range(6)]
    with pytest.raises(TrainingError, match="every advantage"):
        world.run()

    assert world.ledger.cycle(1).status == "failed"
    assert world.ledger.trained_rows() == []
    assert world.backends == []
    assert world.tracker.runs == {}
    world.source.rows += [row(n, reward=1.0) for n in range(6, 9)]
    assert len(world.run().plan.rows) == 9


def test_a_cycle_that_always_dies_is_given_up(world: World) -> None:
    for _ in range(3):
        with pytest.raises(Killed):
            world.run(fault=killed_at("parent_fetched"))

    cycle = world.run()

    assert cycle.number == 2
    assert world.ledger.cycle(1).reason == "given up after 3 attempts"
    assert cycle.plan.rows == world.ledger.cycle(1).plan.rows


def test_uploading_what_is_trained_is_repeated_however_often_it_dies(world: World) -> None:
    for point in (*["parent_fetched"] * 2, *["uploaded"] * 4):
        with pytest.raises(Killed):
            world.run(fault=killed_at(point))

    cycle = world.run()

    assert (cycle.number, cycle.status, cycle.attempts) == (1, "registered", 3)
    assert len(world.backends) == 1


def test_a_version_that_is_there_is_never_given_up(world: World) -> None:
    with pytest.raises(Killed):
        world.run(fault=killed_at("version_created"))
    with world.database.write() as connection:
        connection.execute("UPDATE cycles SET status = 'planned', attempts = 99")

    assert world.run().version == 2
    assert world.ledger.count() == 1


def test_a_plan_for_another_champion_is_given_up_and_made_anew(world: World) -> None:
    with pytest.raises(Killed):
        world.run(fault=killed_at("first_step"))
    world.registry.folders[2] = world.registry.folders[1]
    world.registry.aliases["champion"] = 2
    world.source.served = [1, 2]

    cycle = world.run()

    assert world.ledger.cycle(1).reason == "the champion is 2 now, planned for 1"
    assert cycle.number == 2
    assert cycle.plan.parent_version == 2


def test_a_cycle_whose_parent_left_while_it_trained_registers_nothing(world: World) -> None:
    def promoted(here: str) -> None:
        if here == "first_step":
            world.registry.folders[2] = world.registry.folders[1]
            world.registry.aliases["champion"] = 2

    with pytest.raises(TrainingError, match="the champion is 2 now, planned for 1"):
        world.run(fault=promoted)

    assert "candidate" not in world.registry.aliases
    assert world.ledger.cycle(1).status == "failed"
    assert world.ledger.trained_rows() == []


def test_the_window_asks_for_versions_that_served_recently(world: World) -> None:
    world.registry.folders[6] = world.registry.folders[1]
    world.registry.aliases["champion"] = 6
    world.source.served = [1, 2, 4, 5, 6]
    world.run()

    assert world.source.queries[0].versions == {4, 5, 6}


def test_a_parent_with_a_wrong_hash_is_not_trained_from(world: World) -> None:
    (world.registry.folders[1] / "model.safetensors").write_bytes(b"bits")

    with pytest.raises(WeightsError, match="sha256"):
        world.run()
    assert world.backends == []
    assert world.ledger.cycle(1).status == "planned"


def test_a_registry_that_is_away_changes_nothing(world: World) -> None:
    class Away(MemoryRegistry):
        def check(self) -> None:
            raise ServiceUnavailable("away")

    with pytest.raises(ServiceUnavailable):
        world.run(registry=Away())
    assert world.ledger.count() == 0


@pytest.mark.parametrize(
    ("point", "status"), [("outcome_written", "planned"), ("trained", "trained")]
)
def test_a_trainer_that_was_overtaken_registers_nothing(
    world: World, point: str, status: str
) -> None:
    lease = world.lease()

    def steal(here: str) -> None:
        if here == point:
            thief = world.lease(clock=lambda: time.time() + 61).take()
            world.ledger.begin(lease=thief)

    with pytest.raises(LeaseHeld, match="lost the lease"), lease:
        run_cycle(world.parts(fault=steal), lease=lease)
    assert list(world.registry.folders) == [1]
    assert world.ledger.cycle(1).status == status


def test_a_trainer_that_was_overtaken_registers_nothing_though_nobody_wrote_the_ledger(
    world: World,
) -> None:
    """The successor has the lease and has done nothing yet: only the tables know."""
    lease = world.lease()

    def steal(here: str) -> None:
        if here == "trained":
            world.lease(clock=lambda: time.time() + 61).take()

    with pytest.raises(LeaseHeld, match="taken by somebody else, whose fence is 2"), lease:
        run_cycle(world.parts(fault=steal), lease=lease)
    assert [each.number for each in world.registry.versions()] == [1]
    assert world.ledger.cycle(1).status == "trained"


def test_a_trainer_refuses_its_predecessor_before_it_reads_the_ledger(world: World) -> None:
    class Away(MemoryRegistry):
        def champion(self) -> int:
            raise ServiceUnavailable("away")

    with world.lease() as old:
        cycle = world.ledger.add(plan(), lease=old)
        with world.lease(clock=lambda: time.time() + 61) as new:
            with pytest.raises(ServiceUnavailable):
                run_cycle(world.parts(registry=Away()), lease=new)
            with pytest.raises(LeaseHeld):
                world.ledger.mark_trained(cycle, lease=old)


def test_old_outcomes_leave_the_disk_and_the_newest_stay(world: World) -> None:
    config = TrainerConfig(min_labelled_rows=4, tokens_per_step=6, keep_cycles=1)
    world.run(config=config)
    world.source.rows += [row(n, reward=float(n % 2)) for n in range(20, 26)]
    world.run(config=config)

    left = [folder.name for folder in (world.folder / "trainer" / "cycles").iterdir()]
    assert left == ["assistant-c00002-20261101t120000"]
