"""Snapshots hold rows under a name."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.snapshots.named import (
    create_snapshot,
    drop_snapshot,
    find,
    hold,
    mark_snapshot,
    readable,
    release,
    snapshots,
)
from onlinerl.rollout_store.snapshots.pins import held_versions
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect
from tests.events import NOON
from tests.rollout_store.people import People

LATER = NOON + timedelta(hours=1)


@pytest.fixture
def people(tmp_path: Path) -> People:
    people = People(tmp_path)
    people.says("a", user="ada", session="s")
    return people


def test_a_snapshot_shows_the_same_rows_whatever_is_added_later(people: People) -> None:
    held = create_snapshot(people.store, "june", actor="me", reason="gate", at=NOON)
    people.says("b", user="bob", session="s")

    with connect(
        people.store,
        rewards=RewardsConfig(),
        versions=readable(people.store, "june", at=LATER).versions,
    ) as connection:
        (count,) = connection.execute("SELECT count(*) FROM interactions").fetchall()[0]
    assert count == 1
    assert held.versions["interactions"] == 1
    assert len(people.column("interactions", "interaction_id")) == 2


def test_a_held_name_is_refused_and_a_dropped_name_is_free(people: People) -> None:
    create_snapshot(people.store, "june", actor="me", reason="", at=NOON)

    with pytest.raises(ConfigError, match="'june' exists since 2026-01-02 12:00 by me; drop it"):
        create_snapshot(people.store, "june", actor="you", reason="", at=LATER)
    drop_snapshot(people.store, "june", actor="me", reason="", at=LATER)
    people.says("b", user=None, session="s")
    again = create_snapshot(people.store, "june", actor="you", reason="", at=LATER)

    assert again.versions["interactions"] == 2
    assert find(people.store, "june") == again


def test_of_many_that_create_one_name_at_once_one_succeeds(people: People) -> None:
    def attempt(actor: str) -> bool:
        try:
            create_snapshot(DeltaStore(people.store.root), "june", actor=actor, reason="", at=LATER)
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(attempt, "abcd"))

    assert won.count(True) == 1
    assert [each.name for each in snapshots(people.store)] == ["june"]


@pytest.mark.parametrize("name", ["", "with space", "cycle/1", "-dash", "x" * 129, "ümlaut"])
def test_a_malformed_name_is_refused(people: People, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a snapshot name"):
        create_snapshot(people.store, name, actor="me", reason="", at=NOON)


def test_a_snapshot_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no tables"):
        create_snapshot(DeltaStore(str(tmp_path)), "june", actor="me", reason="", at=NOON)


def test_dropping_twice_is_one_act(people: People) -> None:
    create_snapshot(people.store, "june", actor="me", reason="", at=NOON)
    drop_snapshot(people.store, "june", actor="me", reason="", at=LATER)
    drop_snapshot(people.store, "june", actor="me", reason="", at=LATER)

    assert people.column("audit", "action") == ["snapshot.create", "snapshot.drop"]
    assert held_versions(people.store, at=LATER) == {}
    with pytest.raises(ConfigError, match="'june' was given up at 2026-01-02 13:00"):
        readable(people.store, "june", at=LATER)


def test_an_unknown_name_is_an_error(people: People) -> None:
    with pytest.raises(ConfigError, match="there is no snapshot 'july'"):
        drop_snapshot(people.store, "july", actor="me", reason="", at=NOON)
    with pytest.raises(ConfigError, match="there is no snapshot 'july'"):
        readable(people.store, "july", at=NOON)


def test_a_marked_snapshot_says_why_it_cannot_be_read(people: People) -> None:
    held = create_snapshot(people.store, "june", actor="me", reason="", at=NOON)
    mark_snapshot(people.store, held, actor="erase", reason="rows in it were erased", at=LATER)

    with pytest.raises(ConfigError, match="since 2026-01-02 13:00: rows in it were erased"):
        readable(people.store, "june", at=LATER)
    assert held_versions(people.store, at=LATER) == {}


def test_the_newest_row_counts_even_if_a_clock_went_back(people: People) -> None:
    create_snapshot(people.store, "june", actor="me", reason="", at=LATER)
    drop_snapshot(people.store, "june", actor="me", reason="", at=NOON)

    assert held_versions(people.store, at=LATER + timedelta(days=1)) == {}


def test_a_hold_expires_unless_it_is_repeated(people: People) -> None:
    versions = {"interactions": 1}
    hold(people.store, "cycle/7", versions=versions, at=NOON, for_s=60)

    assert held_versions(people.store, at=NOON) == {"interactions": {1}}
    assert held_versions(people.store, at=NOON + timedelta(seconds=60)) == {}
    hold(people.store, "cycle/7", versions=versions, at=NOON + timedelta(seconds=50), for_s=60)
    assert held_versions(people.store, at=NOON + timedelta(seconds=100)) == {"interactions": {1}}


def test_a_released_hold_holds_nothing(people: People) -> None:
    hold(people.store, "cycle/7", versions={"interactions": 1}, at=NOON, for_s=60)
    release(people.store, "cycle/7", at=NOON)
    release(people.store, "cycle/7", at=NOON)
    release(people.store, "cycle/8", at=NOON)

    assert held_versions(people.store, at=NOON) == {}


def test_a_mark_of_a_hold_is_final(people: People) -> None:
    held = hold(people.store, "cycle/7", versions={"interactions": 1}, at=NOON, for_s=600)
    mark_snapshot(people.store, held, actor="erase", reason="erased", at=NOON)
    # As by a process that looked before the mark was there, and wrote after it.
    people.store.append("snapshots", _row_of_a_hold(at=LATER))

    again = hold(people.store, "cycle/7", versions={"interactions": 1}, at=LATER, for_s=600)

    assert again.action == "mark"
    assert again.reason == "erased"
    assert held_versions(people.store, at=LATER) == {}


def _row_of_a_hold(*, at: datetime) -> object:
    from onlinerl.rollout_store.schema import SnapshotRow
    from onlinerl.rollout_store.tables.rows import to_table

    return to_table(
        [
            SnapshotRow(
                name="cycle/7",
                action="create",
                versions='{"interactions": 1}',
                actor="cycle/7",
                reason="while it runs",
                expires_at=at.astimezone(UTC) + timedelta(hours=1),
                acted_at=at,
                ingest_date=at.date(),
            )
        ]
    )
