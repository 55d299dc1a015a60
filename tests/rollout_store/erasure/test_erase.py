"""An erasure removes everything of a person, and nothing else."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyarrow import parquet

from onlinerl.errors import ConfigError, ServiceUnavailable, StoreConflict
from onlinerl.rollout_store.erasure import erase as erasure_module
from onlinerl.rollout_store.erasure import resurrection as resurrection_module
from onlinerl.rollout_store.erasure.erase import STEPS, Erasure
from onlinerl.rollout_store.erasure.erased import ErasedSet
from onlinerl.rollout_store.erasure.person_ids import IdsByTenant
from onlinerl.rollout_store.erasure.resurrection import remove_resurrected
from onlinerl.rollout_store.erasure.state import StateFile
from onlinerl.rollout_store.snapshots.named import create_snapshot, find, hold, readable
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.deletion import Position, delete_positions
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.upkeep.config import RetentionConfig
from onlinerl.rollout_store.upkeep.retention import expire
from tests.events import NOON, feedback, feedback_row, interaction, interaction_rows
from tests.rollout_store.people import People, hash_of, some_id

ADA = {"acme": hash_of("ada")}


class Killed(BaseException):
    """Stands for the end of the process."""


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def people(tmp_path: Path) -> People:
    """Ada and Bob, a session of both, and a session of Bob that extends one of Ada's."""
    people = People(tmp_path)
    ada = people.says("ada-1", user="ada", session="s-ada")
    people.says("mate-1", user=None, session="s-ada")
    bob = people.says("bob-1", user="bob", session="s-bob")
    people.says("heir-1", user="bob", session="s-heir", parent_id=ada, prefix_length=5)
    people.says("heir-2", user="bob", session="s-heir2", parent_id=some_id("heir-1"))
    people.says("apart-1", user="bob", session="s-heir")
    people.judges("about-ada", interaction_id=ada)
    people.judges("about-bob", interaction_id=bob)
    people.judges("about-session", session_id="s-ada")
    people.judges("by-ada", interaction_id=bob, user="ada")
    people.judges("tells-of-ada", interaction_id=bob, comment=f"see {ada}")
    people.breaks(json.dumps({"user": ADA["acme"], "tenant": "acme"}).encode())
    people.breaks(b"\xff not JSON", key=b"s-ada")
    people.breaks(b'{"of": "nobody"}')
    return people


KEPT_INTERACTIONS = sorted(some_id(name) for name in ("bob-1", "apart-1"))


def erasure(people: People, **changes: object) -> Erasure:
    folder = Path(people.store.root).parent / "erasures"
    values: dict[str, object] = {
        "store": people.store,
        "state_file": StateFile(folder, users=sorted(ADA.items())),
        "actor": "me",
        "settle_s": 0.0,
    }
    return Erasure(**(values | changes))  # type: ignore[arg-type]


def mentions(people: People, *texts: str) -> list[str]:
    """Files that contain one of the texts, searched without the code under test."""
    found = []
    for path in Path(people.store.root).rglob("*"):
        if path.is_file():
            content = path.read_bytes().decode("latin-1")
            if path.suffix == ".parquet":
                content += str(parquet.read_table(path, partitioning=None).to_pylist())
            found += [str(path) for text in texts if text in content]
    return found


def traces_of_ada(people: People) -> list[str]:
    gone = [some_id(name) for name in ("ada-1", "mate-1", "heir-1", "heir-2")]
    return mentions(people, ADA["acme"], *gone)


def check_that_only_ada_is_gone(people: People) -> None:
    assert traces_of_ada(people) == []
    assert people.column("interactions", "interaction_id") == KEPT_INTERACTIONS
    assert people.column("feedback", "feedback_id") == ["about-bob"]
    assert people.column("dead_letters", "payload") == [b'{"of": "nobody"}']


def test_an_erasure_removes_everything_of_a_person_and_nothing_of_others(people: People) -> None:
    report = erasure(people).run(ADA)

    check_that_only_ada_is_gone(people)
    assert report.rows_deleted == {"interactions": 4, "feedback": 4, "dead_letters": 2}
    assert (report.num_sessions, report.num_interactions, report.traces_left) == (1, 4, 0)
    assert report.files_removed == 10
    assert report.files_scanned > 20


def test_the_trace_search_of_these_tests_finds_traces(people: People) -> None:
    assert len(traces_of_ada(people)) >= 8


def test_unreferenced_files_are_searched_too(people: People) -> None:
    people.store.delta("interactions").optimize.compact()
    people.store.delta("interactions").delete("tenant = 'acme'")
    left = Path(people.store.root) / "interactions/ingest_date=2026-01-02/part-left.parquet"
    rows = to_table(interaction_rows(interaction(some_id("x"), user=ADA["acme"]))).drop(
        ["ingest_date"]
    )
    parquet.write_table(rows, left)

    erasure(people).run(ADA)

    assert traces_of_ada(people) == []
    assert people.column("feedback", "feedback_id") == ["about-bob"]


def test_a_second_erasure_finds_nothing(people: People) -> None:
    erasure(people).run(ADA)
    again = erasure(people).run(ADA)

    check_that_only_ada_is_gone(people)
    assert again.rows_deleted == {}
    assert again.files_removed == 0


@pytest.mark.parametrize("first", STEPS)
@pytest.mark.parametrize("second", [None, "deleted"])
def test_an_erasure_killed_at_any_step_completes_when_repeated(
    people: People, first: str, second: str | None
) -> None:
    with pytest.raises(Killed):
        erasure(people, fault=killed_at(first)).run(ADA)
    report = None
    with contextlib.suppress(Killed):  # a step that has nothing left to do is not passed
        report = erasure(people, fault=killed_at(second or "none")).run(ADA)
    report = report or erasure(people).run(ADA)

    check_that_only_ada_is_gone(people)
    assert report.rows_deleted == {"interactions": 4, "feedback": 4, "dead_letters": 2}
    assert not list((Path(people.store.root).parent / "erasures").iterdir())


def killed_at(step: str) -> Callable[[str], None]:
    def fault(at: str) -> None:
        if at == step:
            raise Killed

    return fault


def test_an_erasure_killed_between_tables_still_finds_all_rows(people: People) -> None:
    """The interactions are deleted and the feedback on them is not: the state file has the ids."""
    erasure(people, fault=lambda step: None).state_file.save(erasure(people).plan(ADA))
    people.store.delta("interactions").delete("true")
    for path in (Path(people.store.root) / "interactions").glob("*/*.parquet"):
        path.unlink()

    erasure(people).run(ADA)

    assert people.column("feedback", "feedback_id") == ["about-bob"]


def test_an_erasure_whose_process_was_killed_completes_when_repeated(people: People) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from onlinerl.rollout_store.erasure.erase import Erasure\n"
        "from onlinerl.rollout_store.erasure.state import StateFile\n"
        "from onlinerl.rollout_store.tables.delta_store import DeltaStore\n"
        "root, folder, user = sys.argv[1:]\n"
        "def fault(step):\n"
        "    if step == 'deleted':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "Erasure(store=DeltaStore(root), actor='me', settle_s=0, fault=fault,\n"
        "    state_file=StateFile(Path(folder), users=[('acme', user)])).run({'acme': user})\n"
    )
    folder = Path(people.store.root).parent / "erasures"
    ended = subprocess.run(
        [sys.executable, "-c", script, people.store.root, str(folder), ADA["acme"]],
        timeout=120,
        check=False,
        env=os.environ,
    )

    assert ended.returncode == -9
    assert list(folder.iterdir())
    erasure(people).run(ADA)
    check_that_only_ada_is_gone(people)
    assert not list(folder.iterdir())


def test_only_snapshots_with_erased_rows_are_marked(tmp_path: Path) -> None:
    people = People(tmp_path)
    bob = people.says("bob-1", user="bob", session="s-bob")
    create_snapshot(people.store, "before", actor="me", reason="", at=now())
    people.says("ada-1", user="ada", session="s-ada")
    create_snapshot(people.store, "with", actor="me", reason="", at=now())
    hold(people.store, "cycle/3", versions=people.store.versions(), at=now(), for_s=600)
    people.store.delta("interactions").optimize.compact()

    report = erasure(people).run(ADA)

    assert sorted(report.snapshots_marked) == ["cycle/3", "with"]
    with pytest.raises(ConfigError, match="rows in it were erased by"):
        readable(people.store, "with", at=now())
    versions = readable(people.store, "before", at=now()).versions
    rows = people.store.dataset("interactions", version=versions["interactions"]).to_table()
    assert rows["interaction_id"].to_pylist() == [bob]
    held = find(people.store, "cycle/3")
    assert held is not None
    assert held.action == "mark"
    assert traces_of_ada(people) == []


@pytest.mark.parametrize("step", ["marked", "deleted"])
def test_a_snapshot_created_during_an_erasure_is_marked_and_stops_no_upkeep(
    people: People, step: str
) -> None:
    """Created before the deletion, or with versions that were read before it."""
    before = people.store.versions()

    def meanwhile(at: str) -> None:
        if at == step:
            hold(people.store, "cycle/3", versions=before, at=now(), for_s=600)
            people.says("cat-1", user="cat", session="s-cat")
            create_snapshot(people.store, f"after-{at}", actor="me", reason="", at=now())

    report = erasure(people, fault=meanwhile).run(ADA)

    marked = {"cycle/3", "after-marked"} if step == "marked" else {"cycle/3"}
    assert set(report.snapshots_marked) == marked
    for name in marked:
        with pytest.raises(ConfigError, match="cannot be read since"):
            readable(people.store, name, at=now())
    if step == "deleted":
        assert readable(people.store, "after-deleted", at=now())
    done = expire(people.store, RetentionConfig(interactions=9000), actor="maintain", at=now())
    assert list(done) == []


def test_a_log_with_statistics_of_ids_is_cut(people: People) -> None:
    """Tables of other writers may keep least and greatest ids in their log."""
    table = f"{people.store.root}/interactions"
    DeltaTable(table).alter.set_table_properties(
        {"delta.dataSkippingStatsColumns": "interaction_id,user"}
    )
    people.says("ada-2", user="ada", session="s-ada")
    people.says("bob-2", user="bob", session="s-bob")
    create_snapshot(people.store, "old", actor="me", reason="", at=now())
    assert any("_delta_log" in path for path in mentions(people, ADA["acme"]))

    report = erasure(people).run(ADA)

    assert mentions(people, ADA["acme"], some_id("ada-2")) == []
    assert report.snapshots_marked == ("old",)
    assert some_id("bob-2") in people.column("interactions", "interaction_id")


def test_the_log_of_our_tables_never_holds_an_id(people: People) -> None:
    people.store.delta("interactions").optimize.compact()
    people.store.delta("interactions").create_checkpoint()
    erasure(people).run(ADA)
    found = mentions(people, hash_of("bob"), some_id("bob-1"))

    assert found
    assert [path for path in found if "_delta_log" in path] == []


def test_report_audit_and_digests_do_not_name_the_person(people: People) -> None:
    report = erasure(people).run(ADA)

    told = report.model_dump_json() + str(people.store.dataset("audit").to_table().to_pylist())
    told += str(people.store.dataset("erased").to_table().to_pylist())
    assert ADA["acme"] not in told
    assert some_id("ada-1") not in told
    assert "s-ada" not in told
    assert people.column("audit", "action") == ["erase"]


def test_a_plan_changes_nothing(people: People) -> None:
    before = people.store.versions()

    plan = erasure(people).plan(ADA)

    assert len(plan.ids["acme"].interactions) == 4
    assert plan.ids["acme"].sessions == {"s-ada"}
    assert people.store.versions() == before
    assert not (Path(people.store.root).parent / "erasures").exists()


def test_another_tenant_with_the_same_names_is_not_touched(tmp_path: Path) -> None:
    people = People(tmp_path)
    people.says("ada-1", user="ada", session="s-ada")
    other = people.says("ada-2", user="ada", session="s-ada", tenant="globex")

    erasure(people).run(ADA)

    assert people.column("interactions", "interaction_id") == [other]


def test_an_erasure_waits_for_files_that_may_still_be_committed(people: People) -> None:
    underway = Path(people.store.root) / "interactions/ingest_date=2026-01-02/part-x.parquet"
    rows = to_table(interaction_rows(interaction(some_id("x"), user=ADA["acme"]))).drop(
        ["ingest_date"]
    )
    parquet.write_table(rows, underway)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        assert underway.exists()
        waits.append(seconds)
        old = time.time() - 3600
        os.utime(underway, (old, old))

    report = erasure(people, settle_s=30.0, sleep=sleep).run(ADA)

    assert len(waits) == 1
    assert 0 < waits[0] <= 30
    assert not underway.exists()
    assert report.traces_left == 0


def test_traces_that_cannot_be_removed_fail_the_erasure(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure_module, "delete_positions", lambda store, table, positions: 0)

    with pytest.raises(StoreConflict, match=r"traces are still in .* after 12 rounds"):
        erasure(people).run(ADA)
    assert list((Path(people.store.root).parent / "erasures").iterdir())


class MemoryCopy:
    """An OutsideCopy that records its calls."""

    name = "spool"

    def __init__(self) -> None:
        self.asked: list[IdsByTenant] = []

    def forget(self, ids: IdsByTenant) -> int:
        self.asked.append(ids)
        return 3


def test_copies_outside_the_tables_are_forgotten_and_versions_are_named(people: People) -> None:
    copy = MemoryCopy()

    report = erasure(
        people, copies=[copy], trained_on=lambda ids: {7: len(ids["acme"].interactions)}
    ).run(ADA)

    assert copy.asked[0]["acme"].user == ADA["acme"]
    assert report.copies_forgotten == {"spool": 3}
    assert report.versions_trained == {"7": 4}


def test_events_replayed_by_the_broker_are_not_stored(people: People) -> None:
    erasure(people).run(ADA)
    erased = ErasedSet(people.store)
    erased.refresh()
    again = [
        interaction(some_id("ada-1"), user=ADA["acme"], session_id="s-ada", served_at=NOON),
        interaction(some_id("mate-1"), session_id="s-ada", served_at=NOON),
        interaction(some_id("mate-2"), session_id="s-ada", served_at=NOON),
        interaction(some_id("heir-1"), session_id="s-heir", served_at=NOON),
        interaction(some_id("bob-1"), session_id="s-bob", served_at=NOON),
        interaction(some_id("x"), session_id="s-ada", tenant="globex", served_at=NOON),
    ]
    rows = to_table([row for event in again for row in interaction_rows(event)])
    signals = to_table(
        [
            feedback_row(event)
            for event in (
                feedback("f1", interaction_id=some_id("ada-1")),
                feedback("f2", session_id="s-ada"),
                feedback("f3", interaction_id=some_id("bob-1"), user=ADA["acme"]),
                feedback("f4", interaction_id=some_id("bob-1")),
            )
        ]
    )

    kept = erased.without("interactions", rows)

    assert kept["interaction_id"].to_pylist() == [some_id("bob-1"), some_id("x")]
    assert erased.without("feedback", signals)["feedback_id"].to_pylist() == ["f4"]


def test_dead_letters_of_the_person_are_not_stored_again(people: People) -> None:
    erasure(people).run(ADA)
    erased = ErasedSet(people.store)
    erased.refresh()
    people.breaks(json.dumps({"tenant": "acme", "session_id": "s-ada"}).encode())
    people.breaks(b"[" * 100_000)
    letters = people.store.dataset("dead_letters").to_table()

    kept = erased.without("dead_letters", letters)["payload"].to_pylist()

    assert sorted(kept) == [b"[" * 100_000, b'{"of": "nobody"}']


def test_later_events_of_an_erased_person_are_stored(people: People) -> None:
    erasure(people).run(ADA)
    erased = ErasedSet(people.store)
    erased.refresh()
    later = interaction(
        some_id("ada-9"),
        user=ADA["acme"],
        session_id="s-ada",
        served_at=now() + timedelta(seconds=1),
    )
    rows = to_table(interaction_rows(later))

    assert erased.without("interactions", rows).num_rows == 1


def test_feedback_on_a_row_that_was_never_stored_is_not_stored_either(people: People) -> None:
    """Ingest records which rows it left out, for its next start, for upkeep and for `erase`."""
    erasure(people).run(ADA)
    first, second = ErasedSet(people.store), ErasedSet(people.store)
    first.refresh()
    late = interaction(some_id("ada-8"), user=ADA["acme"], session_id="s-8", served_at=NOON)
    mate = interaction(some_id("mate-8"), session_id="s-8", served_at=NOON)
    about = to_table(
        [feedback_row(feedback(f"on-{name}", interaction_id=some_id(name))) for name in ("ada-8",)]
        + [feedback_row(feedback("on-session", session_id="s-8"))]
    )
    rows = to_table(interaction_rows(late) + interaction_rows(mate))

    assert first.without("interactions", rows).num_rows == 0
    first.record(at=now())
    version = people.store.versions()["erased"]
    first.record(at=now())
    second.refresh()

    assert people.store.versions()["erased"] == version
    assert first.without("feedback", about).num_rows == 0
    assert second.without("feedback", about).num_rows == 0
    people.judges("on-mate-8", interaction_id=some_id("mate-8"))
    assert erasure(people).run(ADA).rows_deleted == {"feedback": 1}
    assert people.column("feedback", "feedback_id") == ["about-bob"]


def test_the_erased_set_sees_new_erasures_after_a_refresh(people: People) -> None:
    erased = ErasedSet(people.store)
    erased.refresh()
    erasure(people).run(ADA)
    rows = to_table(interaction_rows(interaction(some_id("ada-1"), user=ADA["acme"])))

    assert erased.without("interactions", rows) is rows
    erased.refresh()
    assert erased.without("interactions", rows).num_rows == 0


def test_upkeep_deletes_resurrected_rows(people: People) -> None:
    erasure(people).run(ADA)
    people.says("ada-1", user="ada", session="s-ada", at=NOON)
    people.says("ada-new", user="ada", session="s-new", at=now() + timedelta(hours=1))
    people.judges("again", interaction_id=some_id("ada-1"))
    # Rows are looked for from shortly before the first erasure on.
    assert remove_resurrected(people.store, actor="maintain", at=now()) == 0
    people.stored_at = now()
    people.says("ada-1", user="ada", session="s-ada", at=NOON)
    people.says("ada-unknown", user="ada", session="s-other", at=NOON)
    people.says("mate-unknown", user=None, session="s-ada", at=NOON)
    people.judges("again", interaction_id=some_id("ada-1"))

    assert remove_resurrected(people.store, actor="maintain", at=now()) == 4
    assert remove_resurrected(people.store, actor="maintain", at=now()) == 0
    assert some_id("ada-new") in people.column("interactions", "interaction_id")
    assert "erase.resurrected" in people.column("audit", "action")


def test_snapshots_with_resurrected_rows_are_marked(people: People) -> None:
    erasure(people).run(ADA)
    create_snapshot(people.store, "before", actor="me", reason="", at=now())
    people.stored_at = now()
    people.says("ada-1", user="ada", session="s-ada", at=NOON)
    people.judges("again", interaction_id=some_id("ada-1"))
    create_snapshot(people.store, "with", actor="me", reason="", at=now())
    hold(people.store, "cycle/3", versions=people.store.versions(), at=now(), for_s=600)

    assert remove_resurrected(people.store, actor="maintain", at=now()) == 2

    with pytest.raises(ConfigError, match="rows in it were of an erased person"):
        readable(people.store, "with", at=now())
    held = find(people.store, "cycle/3")
    assert held is not None
    assert held.action == "mark"
    assert readable(people.store, "before", at=now())


def test_a_snapshot_created_while_resurrected_rows_are_deleted_is_marked(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    erasure(people).run(ADA)
    people.stored_at = now()
    people.says("ada-1", user="ada", session="s-ada", at=NOON)

    def delete_late(store: DeltaStore, table: str, positions: Iterable[Position]) -> int:
        create_snapshot(store, "with", actor="me", reason="", at=now())
        return delete_positions(store, table, positions)

    monkeypatch.setattr(resurrection_module, "delete_positions", delete_late)

    assert remove_resurrected(people.store, actor="maintain", at=now()) == 1
    with pytest.raises(ConfigError, match="rows in it were of an erased person"):
        readable(people.store, "with", at=now())


def test_upkeep_deletes_resurrected_dead_letters(people: People) -> None:
    erasure(people).run(ADA)
    people.stored_at = now()
    create_snapshot(people.store, "before", actor="me", reason="", at=now())
    people.breaks(json.dumps({"tenant": "acme", "session_id": "s-ada"}).encode())
    people.breaks(json.dumps({"tenant": "acme", "session_id": "s-bob"}).encode())
    create_snapshot(people.store, "with", actor="me", reason="", at=now())

    assert remove_resurrected(people.store, actor="maintain", at=now()) == 1
    assert remove_resurrected(people.store, actor="maintain", at=now()) == 0

    assert people.column("dead_letters", "payload") == [
        b'{"of": "nobody"}',
        b'{"tenant": "acme", "session_id": "s-bob"}',
    ]
    with pytest.raises(ConfigError, match="rows in it were of an erased person"):
        readable(people.store, "with", at=now())
    assert readable(people.store, "before", at=now())


def test_an_audit_row_that_names_the_person_is_redacted(people: People) -> None:
    ada = some_id("ada-1")
    record_act(
        people.store, actor="me", action="look", subject=f"row {ada}", detail={"of": ada}, at=now()
    )
    record_act(people.store, actor="me", action="look", subject="row 7", detail={}, at=now())
    create_snapshot(people.store, "june", actor="me", reason=f"about {ada}", at=now())

    report = erasure(people).run(ADA)

    assert report.traces_left == 0
    assert traces_of_ada(people) == []
    acts = people.store.dataset("audit").to_table().to_pylist()
    assert [(act["subject"], act["detail"]) for act in acts if act["action"] == "look"] == [
        ("erased", '{"erased": true}'),
        ("row 7", "{}"),
    ]
    names = people.store.dataset("snapshots").to_table().to_pylist()
    assert {(row["name"], row["action"]) for row in names} == {("june", "create"), ("june", "mark")}


def data_folder(people: People) -> Path:
    return Path(people.store.root) / "interactions/ingest_date=2026-01-02"


@pytest.mark.parametrize("name", ["part-x.parquet#1", "../_delta_log/_commit_x.json.tmp"])
def test_unfinished_files_of_dead_writers_are_removed(people: People, name: str) -> None:
    left = data_folder(people) / name
    left.write_bytes(b"PAR1 and half a row")

    assert erasure(people).run(ADA).traces_left == 0
    assert not left.exists()


def test_unfinished_files_written_after_the_exclusion_stay(people: People) -> None:
    begun = data_folder(people) / "part-x.parquet#1"

    def begin(step: str) -> None:
        if step == "marked":
            begun.write_bytes(b"PAR1")
            os.utime(begun, (time.time() + 60, time.time() + 60))

    erasure(people, fault=begin).run(ADA)

    assert begun.exists()


@pytest.mark.parametrize("keep", [0, 100])
def test_an_unreferenced_damaged_file_is_removed(people: People, keep: int) -> None:
    some = next(data_folder(people).glob("*.parquet")).read_bytes()
    damaged = data_folder(people) / "part-damaged.parquet"
    damaged.write_bytes(some[:keep])

    assert erasure(people).run(ADA).traces_left == 0
    assert not damaged.exists()


def test_a_referenced_damaged_file_fails_the_erasure_and_is_named(people: People) -> None:
    some = next(data_folder(people).glob("*.parquet"))
    some.write_bytes(some.read_bytes()[:-50])

    with pytest.raises(ServiceUnavailable, match=rf"interactions/.*{some.name} is damaged"):
        erasure(people).run(ADA)
    assert some.exists()


def test_a_clock_that_went_back_does_not_prolong_the_wait(people: People) -> None:
    """A file from an hour ahead is waited for once, as long as one that was just written."""
    left = data_folder(people) / "part-x.parquet"
    rows = to_table(interaction_rows(interaction(some_id("x"), user=ADA["acme"])))
    parquet.write_table(rows.drop(["ingest_date"]), left)
    os.utime(left, (time.time() + 3600, time.time() + 3600))
    waits: list[float] = []

    erasure(people, settle_s=30.0, sleep=waits.append).run(ADA)

    assert waits == [30.0]
    assert not left.exists()


def test_a_tenant_added_after_the_first_attempt_is_searched_too(people: People) -> None:
    with pytest.raises(Killed):
        erasure(people, fault=killed_at("files_removed")).run(ADA)
    other = people.says("ada-2", user="ada", session="s", tenant="globex")

    erasure(people).run({"globex": hash_of("ada", tenant="globex")})

    assert other not in people.column("interactions", "interaction_id")
    check_that_only_ada_is_gone(people)


def test_late_rows_that_extend_an_erased_row_are_not_stored(people: People) -> None:
    erasure(people).run(ADA)
    erased = ErasedSet(people.store)
    erased.refresh()
    late = [
        interaction(some_id("b1"), session_id="s-b", parent_id=some_id("ada-1"), served_at=NOON),
        interaction(some_id("b2"), session_id="s-b", parent_id=some_id("b1"), served_at=NOON),
        interaction(some_id("b3"), session_id="s-b", parent_id=some_id("bob-1"), served_at=NOON),
    ]
    rows = to_table([row for event in late for row in interaction_rows(event)])

    assert erased.without("interactions", rows)["interaction_id"].to_pylist() == [some_id("b3")]
    people.stored_at = now()
    people.says("b1", user="bob", session="s-b", parent_id=some_id("ada-1"))
    assert remove_resurrected(people.store, actor="maintain", at=now()) == 1


def test_rows_that_extend_an_erased_row_are_excluded_in_any_order(people: People) -> None:
    """Parent and child may come from two partitions, and the child first."""
    erasure(people).run(ADA)
    erased = ErasedSet(people.store)
    erased.refresh()
    late = [
        interaction(some_id("b2"), session_id="s-c", parent_id=some_id("b1"), served_at=NOON),
        interaction(some_id("b1"), session_id="s-b", parent_id=some_id("ada-1"), served_at=NOON),
    ]
    rows = to_table([row for event in late for row in interaction_rows(event)])
    signals = to_table([feedback_row(feedback("f1", interaction_id=some_id("b2")))])

    assert erased.without("interactions", rows).num_rows == 0
    assert erased.without("feedback", signals).num_rows == 0
