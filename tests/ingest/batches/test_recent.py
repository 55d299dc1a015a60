from datetime import timedelta
from pathlib import Path

from onlinerl.ingest.batches.recent import RecentEvents, event_key, length_of, stored_events
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from tests.events import NOON, completion, interaction, interaction_rows


def test_the_oldest_are_forgotten_first() -> None:
    a, b, c = (event_key("t", name) for name in "abc")
    recent = RecentEvents(2, [(a, 1), (b, 2)])
    recent.add([(a, 9), (c, 3)])

    assert [key in recent for key in (a, b, c)] == [False, True, True]
    assert len(recent) == 2


def test_more_than_fit_keeps_the_last() -> None:
    recent = RecentEvents(2, [(event_key("t", str(n)), n) for n in range(9)])

    assert event_key("t", "7") in recent
    assert recent.lengths(event_key("t", "8")) == 8
    assert len(recent) == 2


def test_an_id_belongs_to_its_tenant() -> None:
    assert event_key("ab", "c") != event_key("a", "bc")
    assert event_key("1", "1:1") != event_key("11", ":1")


def test_a_length_is_that_of_a_choice_or_unknown() -> None:
    assert (length_of(5, 0), length_of(5, 1)) == (5, None)
    assert (length_of({0: 5, 2: 6}, 2), length_of({}, 0)) == (6, None)


def test_the_newest_of_a_table_are_loaded_with_their_lengths(tmp_path: Path) -> None:
    store = DeltaStore(str(tmp_path))
    store.create()
    for number in range(4):
        event = interaction(
            f"i{number}",
            parent_id="p",
            prefix_length=10 * number,
            choices=[completion(), completion([9], choice_index=1)],
        )
        rows = interaction_rows(event, ingested_at=NOON + timedelta(minutes=number % 3))
        store.append("interactions", to_table(rows))

    recent = stored_events(
        store, "interactions", id_column="interaction_id", capacity=4, with_lengths=True
    )
    assert [event_key("acme", f"i{n}") in recent for n in range(4)] == [False, True, True, False]
    assert recent.lengths(event_key("acme", "i2")) == {0: 25, 1: 24}
    assert recent.lengths(event_key("acme", "i9")) == {}


def test_a_table_without_rows_has_no_recent_events(tmp_path: Path) -> None:
    store = DeltaStore(str(tmp_path))
    store.create()

    for table, column in (("interactions", "interaction_id"), ("feedback", "feedback_id")):
        assert len(stored_events(store, table, id_column=column, capacity=4)) == 0
