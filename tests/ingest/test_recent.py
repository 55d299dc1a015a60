from datetime import timedelta
from pathlib import Path

from onlinerl.ingest.recent import RecentIds, stored_ids
from onlinerl.rollout_store.rows import to_table
from onlinerl.rollout_store.store import DeltaStore
from tests.events import NOON, interaction, interaction_rows


def test_the_oldest_are_forgotten_first() -> None:
    recent = RecentIds(2, [("t", "a"), ("t", "b")])
    recent.add([("t", "a"), ("t", "c")])

    assert [("t", name) in recent for name in "abc"] == [False, True, True]
    assert len(recent) == 2


def test_more_than_fit_keeps_the_last() -> None:
    recent = RecentIds(2, [("t", str(n)) for n in range(9)])

    assert ("t", "7") in recent
    assert ("t", "8") in recent
    assert len(recent) == 2


def test_an_id_belongs_to_its_tenant() -> None:
    assert ("other", "a") not in RecentIds(2, [("t", "a")])


def test_the_newest_of_a_table_are_loaded(tmp_path: Path) -> None:
    store = DeltaStore(str(tmp_path))
    store.create()
    for number in range(4):
        rows = interaction_rows(
            interaction(f"i{number}"), ingested_at=NOON + timedelta(minutes=number % 3)
        )
        store.append("interactions", to_table(rows))

    recent = stored_ids(store, "interactions", id_column="interaction_id", capacity=2)
    assert ("acme", "i2") in recent
    assert ("acme", "i1") in recent
    assert len(recent) == 2
