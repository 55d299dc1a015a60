"""Upkeep that loses nothing."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.snapshots.named import create_snapshot, drop_snapshot, hold
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.files import LOG_FOLDER, TableFiles
from onlinerl.rollout_store.tables.log import checkpoint, clean_log
from onlinerl.rollout_store.upkeep.compaction import compact
from onlinerl.rollout_store.upkeep.config import MaintenanceConfig, RetentionConfig
from onlinerl.rollout_store.upkeep.tables import keep_up, maintain
from onlinerl.rollout_store.upkeep.vacuum import vacuum
from tests.rollout_store.people import People, some_id

RACE_VARIABLE = "ONLINERL_TEST_RACE_S"
RACE_S = float(os.environ.get(RACE_VARIABLE, "10"))
"""How long compaction, appends and reads race; CONTRIBUTING.md says when to give it longer."""

CONFIG = MaintenanceConfig(min_small_files=2, checkpoint_every=5, retention_hours=1)


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    for number in range(6):
        people.says(f"i{number}", user="ada", session=f"s{number}")
    return people


def files_of(people: People, table: str = "interactions") -> int:
    return sum(not f.is_log for f in TableFiles(people.store, table).all())


def log_of(people: People, table: str = "interactions") -> list[str]:
    folder = Path(people.store.root) / table / LOG_FOLDER
    return sorted(path.name for path in folder.iterdir())


def age(people: People, *, hours: float) -> None:
    """Make every file look that old."""
    at = time.time() - hours * 3600
    for path in Path(people.store.root).rglob("*"):
        if path.is_file():
            os.utime(path, (at, at))


def test_compaction_keeps_every_row_and_gathers_the_files(people: People) -> None:
    before = people.column("interactions", "interaction_id")

    done = compact(people.store, "interactions", target_file_bytes=2**20, min_small_files=6)

    assert (done.num_files_before, done.num_files_after) == (6, 1)
    assert len(people.store.delta("interactions").file_uris()) == 1
    assert people.column("interactions", "interaction_id") == before


def test_few_small_files_are_left_alone(people: People) -> None:
    done = compact(people.store, "interactions", target_file_bytes=2**20, min_small_files=7)

    assert done.num_files_before == 0
    assert people.store.delta("interactions").version() == 6


def test_compacting_again_writes_nothing(people: People) -> None:
    compact(people.store, "interactions", target_file_bytes=2**20, min_small_files=2)
    version = people.store.delta("interactions").version()

    compact(people.store, "interactions", target_file_bytes=2**20, min_small_files=2)

    assert people.store.delta("interactions").version() == version


def test_vacuum_removes_what_no_version_needs(people: People) -> None:
    compact(people.store, "interactions", target_file_bytes=2**20, min_small_files=2)

    removed = vacuum(people.store, "interactions", held=set(), retention_hours=0, at=now())

    assert len(removed) == 6
    assert files_of(people) == 1
    assert len(people.column("interactions", "interaction_id")) == 6


def test_a_held_version_is_read_after_a_vacuum_without_retention(people: People) -> None:
    held = create_snapshot(people.store, "june", actor="me", reason="", at=now())
    people.says("late", user="bob", session="s9")
    compact(people.store, "interactions", target_file_bytes=2**20, min_small_files=2)
    version = held.versions["interactions"]

    vacuum(people.store, "interactions", held={version}, retention_hours=0, at=now())

    found = people.store.dataset("interactions", version=version).to_table(["interaction_id"])
    assert sorted(found["interaction_id"].to_pylist()) == sorted(some_id(f"i{n}") for n in range(6))
    assert len(people.column("interactions", "interaction_id")) == 7


def test_young_files_stay_for_their_readers_and_writers(people: People) -> None:
    compact(people.store, "interactions", target_file_bytes=2**20, min_small_files=2)
    underway = Path(people.store.root) / "interactions/ingest_date=2026-01-02/part-x.parquet"
    underway.write_bytes(b"a commit that is about to happen")

    assert vacuum(people.store, "interactions", held=set(), retention_hours=1, at=now()) == []
    assert underway.exists()


def test_what_a_writer_left_behind_goes_when_it_is_old(people: People) -> None:
    left = Path(people.store.root) / "interactions/ingest_date=2026-01-02/part-x.parquet"
    left.write_bytes(b"the writer died before its commit")
    age(people, hours=2)

    removed = vacuum(people.store, "interactions", held=set(), retention_hours=1, at=now())

    assert removed == ["ingest_date=2026-01-02/part-x.parquet"]


def test_what_a_writer_left_unfinished_goes_when_it_is_old(people: People) -> None:
    """A writer gives a file its name at the end; the library's own vacuum never sees it before."""
    root = Path(people.store.root) / "interactions"
    left = [
        root / "ingest_date=2026-01-02/part-x.parquet#1",
        root / "_delta_log/_commit_x.json.tmp",
    ]
    for path in left:
        path.write_bytes(b"half")
    vacuum(people.store, "interactions", held=set(), retention_hours=1, at=now())
    assert all(path.exists() for path in left)
    age(people, hours=2)

    vacuum(people.store, "interactions", held=set(), retention_hours=1, at=now())

    assert not any(path.exists() for path in left)
    assert len(people.column("interactions", "interaction_id")) == 6


def test_a_vacuum_with_nothing_to_do_commits_nothing(people: People) -> None:
    vacuum(people.store, "interactions", held=set(), retention_hours=0, at=now())

    assert people.store.delta("interactions").version() == 6


def test_a_checkpoint_comes_after_so_many_commits(people: People) -> None:
    assert not checkpoint(people.store, "interactions", every=8)
    assert checkpoint(people.store, "interactions", every=7)
    assert not checkpoint(people.store, "interactions", every=7)


def test_the_log_is_cleaned_up_to_a_checkpoint(people: People) -> None:
    people.store.append("interactions", _none(people), transactions=[_step(5)])
    checkpoint(people.store, "interactions", every=1)
    people.says("after", user="ada", session="s")
    age(people, hours=2)

    removed = clean_log(
        people.store, "interactions", held=set(), older_than=now() - timedelta(hours=1)
    )

    assert removed == 7
    assert [name for name in log_of(people) if name.endswith(".json")] == [
        f"{number:020d}.json" for number in (7, 8)
    ]
    assert len(people.column("interactions", "interaction_id")) == 7
    assert people.store.transaction_version("interactions", "app") == 5
    with pytest.raises(ServiceUnavailable):
        people.store.dataset("interactions", version=3)


def test_the_log_of_a_held_version_stays(people: People) -> None:
    checkpoint(people.store, "interactions", every=1)  # at 6
    people.says("seven", user="ada", session="s")
    held = {7}
    people.says("eight", user="ada", session="s")
    checkpoint(people.store, "interactions", every=1)  # at 8, past what is held
    age(people, hours=2)

    removed = clean_log(
        people.store, "interactions", held=held, older_than=now() - timedelta(hours=1)
    )

    assert removed == 6
    assert people.store.dataset("interactions", version=7).count_rows() == 7


def test_a_version_before_every_checkpoint_keeps_the_whole_log(people: People) -> None:
    checkpoint(people.store, "interactions", every=1)
    age(people, hours=2)

    assert not clean_log(people.store, "interactions", held={2}, older_than=now())
    assert people.store.dataset("interactions", version=2).count_rows() == 2


def test_a_young_checkpoint_cleans_nothing(people: People) -> None:
    checkpoint(people.store, "interactions", every=1)

    assert not clean_log(
        people.store, "interactions", held=set(), older_than=now() - timedelta(hours=1)
    )


def test_the_library_does_not_clean_the_log_behind_our_back(people: People) -> None:
    table = people.store.delta("interactions")

    assert table.metadata().configuration["delta.enableExpiredLogCleanup"] == "false"


def test_a_pass_keeps_what_snapshots_and_cycles_hold(people: People) -> None:
    create_snapshot(people.store, "june", actor="me", reason="", at=now())
    people.says("seven", user="ada", session="s7")
    hold(people.store, "cycle/1", versions=people.store.versions(), at=now(), for_s=1e6)
    people.says("eight", user="ada", session="s8")
    run_pass(people)
    age(people, hours=1000)
    run_pass(people, at=now() + timedelta(hours=48))
    only_in_version_8 = vacuum(
        people.store, "interactions", held={6, 7}, retention_hours=0, at=datetime.now(UTC)
    )

    assert len(only_in_version_8) == 1
    assert people.store.dataset("interactions", version=6).count_rows() == 6
    assert people.store.dataset("interactions", version=7).count_rows() == 7
    assert len(people.column("interactions", "interaction_id")) == 8
    drop_snapshot(people.store, "june", actor="me", reason="", at=now())
    assert len(vacuum(people.store, "interactions", held=set(), retention_hours=0, at=now())) == 7


def run_pass(people: People, *, at: datetime | None = None) -> None:
    for _ in maintain(
        people.store,
        config=CONFIG,
        retention=RetentionConfig(),
        actor="maintain",
        now=now if at is None else lambda: at,
    ):
        pass


def test_what_a_pass_did_is_in_the_audit_table(people: People) -> None:
    run_pass(people)

    assert people.column("audit", "action") == ["maintain"]
    assert people.column("audit", "subject") == ["interactions"]


def test_a_table_that_cannot_be_kept_up_does_not_keep_the_others_from_it(people: People) -> None:
    # A held version whose log is gone: nothing of this table is removed, the rest goes on.
    hold(people.store, "cycle/1", versions={"feedback": 40}, at=now(), for_s=60)
    for number in range(3):
        people.judges(f"f{number}", interaction_id=some_id("i1"))

    done = {
        each.table: each
        for each in maintain(
            people.store, config=CONFIG, retention=RetentionConfig(), actor="me", now=now
        )
    }

    assert done["feedback"].trouble is not None
    assert done["interactions"].compacted.num_files_before == 6


def test_a_deletion_beside_an_append_fences_nobody(people: People) -> None:
    stale = DeltaTable(f"{people.store.root}/interactions")
    people.store.append("interactions", _none(people), transactions=[_step(1)])
    stale.delete('"offset" = 1')

    def append() -> None:
        for number in range(2, 12):
            transaction = Transaction(app_id="app", version=number, expected=number - 1)
            people.store.append("interactions", _none(people), transactions=[transaction])

    def delete() -> None:
        for number in range(2, 6):
            people.store.delta("interactions").delete(f'"offset" = {number}')

    with ThreadPoolExecutor(2) as pool:
        for done in (pool.submit(append), pool.submit(delete)):
            done.result(timeout=60)

    assert people.store.transaction_version("interactions", "app") == 11
    assert people.column("interactions", "interaction_id") == [some_id("i5")]


def _none(people: People) -> object:
    return people.store.dataset("interactions").head(0)


def _step(version: int) -> Transaction:
    return Transaction(app_id="app", version=version)


@pytest.mark.slow
def test_upkeep_racing_appends_and_readers_loses_and_breaks_nothing(people: People) -> None:
    """Case: a second writer that compacts while ingest appends and a learner reads."""
    ends = time.monotonic() + RACE_S
    stop = threading.Event()
    config = MaintenanceConfig(min_small_files=3, checkpoint_every=10, retention_hours=1)
    held = create_snapshot(people.store, "june", actor="me", reason="", at=now())
    counts: list[int] = []

    def append() -> int:
        number = 0
        while time.monotonic() < ends:
            people.says(f"race{number}", user="bob", session=f"r{number % 7}")
            number += 1
        stop.set()
        return number

    def keep() -> int:
        store = DeltaStore(people.store.root)
        passes = 0
        while not stop.is_set():
            keep_up(store, "interactions", config=config, at=now())
            passes += 1
        return passes

    def read() -> int:
        store = DeltaStore(people.store.root)
        while not stop.is_set():
            versions = store.versions()
            rows = store.dataset("interactions", version=versions["interactions"]).to_table()
            counts.append(len(set(rows["interaction_id"].to_pylist())))
            pinned = store.dataset("interactions", version=held.versions["interactions"])
            assert pinned.count_rows() == 6
        return len(counts)

    with ThreadPoolExecutor(3) as pool:
        appended, passes, reads = [pool.submit(work) for work in (append, keep, read)]
        total = 6 + appended.result(timeout=RACE_S + 60)
        assert passes.result(timeout=60) > 0
        assert reads.result(timeout=60) > 0

    expected = sorted([some_id(f"i{n}") for n in range(6)] + [
        some_id(f"race{n}") for n in range(total - 6)
    ])  # fmt: skip
    assert people.column("interactions", "interaction_id") == expected
    assert counts == sorted(counts)
    assert any("optimize" in str(entry["operation"]).lower() for entry in _history(people))


def _history(people: People) -> list[dict[str, object]]:
    history: list[dict[str, object]] = people.store.delta("interactions").history()
    return history
