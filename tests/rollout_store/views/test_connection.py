from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.config import MetricConfig, RewardsConfig, StoreConfig
from onlinerl.rollout_store.schema import TABLES, FeedbackRow, PromotionRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import schema_of, to_table
from onlinerl.rollout_store.views.connection import VIEWS, connect
from tests.events import (
    NOON,
    after,
    completion,
    feedback,
    feedback_row,
    interaction,
    interaction_rows,
)
from tests.rollout_store.views_of import stored, views_of

ACCEPTED = RewardsConfig(metrics=(MetricConfig(name="accepted"),))


def test_every_view_reads_as_empty_before_anything_was_created(tmp_path: Path) -> None:
    connection = connect(DeltaStore(str(tmp_path)), rewards=ACCEPTED)

    for view in VIEWS:
        assert connection.execute(f"SELECT * FROM {view}").fetchall() == []


def test_a_view_has_the_columns_of_its_table(tmp_path: Path) -> None:
    connection = views_of(tmp_path, interaction(), feedback())

    for table, row_type in TABLES.items():
        columns = [row[0] for row in connection.execute(f"DESCRIBE {table}").fetchall()]
        assert columns == list(row_type.model_fields)


def test_a_table_without_a_column_of_a_newer_schema_is_read_and_written_on(tmp_path: Path) -> None:
    schema = schema_of(FeedbackRow)
    old = schema.remove(schema.get_field_index("consent"))
    store = DeltaStore(str(tmp_path / "store"))
    DeltaTable.create(f"{store.root}/feedback", schema=old, partition_by=["ingest_date"])
    rows = to_table([feedback_row(feedback("f1"))])
    store.append("feedback", rows.drop_columns(["consent"]))
    before = connect(store, rewards=ACCEPTED)

    then = store.versions()
    store.append("feedback", to_table([feedback_row(feedback("f2", consent="log"))]))
    store.create()
    store.append("interactions", to_table(interaction_rows(interaction())))

    for connection in (before, connect(store, rewards=ACCEPTED, versions=then)):
        columns = [row[0] for row in connection.execute("DESCRIBE feedback").fetchall()]
        assert columns == list(FeedbackRow.model_fields)
        assert connection.execute("SELECT feedback_id, consent FROM feedback").fetchall() == [
            ("f1", None)
        ]
    now = connect(store, rewards=ACCEPTED)
    columns = [row[0] for row in now.execute("DESCRIBE feedback").fetchall()]
    assert columns == list(FeedbackRow.model_fields)
    assert now.execute("SELECT feedback_id, consent FROM feedback ORDER BY 1").fetchall() == [
        ("f1", None),
        ("f2", "log"),
    ]
    assert now.execute("SELECT reward, num_feedback FROM rewards").fetchall() == [(1.0, 1)]


def test_a_row_stored_twice_is_read_once_and_the_first_counts(tmp_path: Path) -> None:
    store = stored(tmp_path, [])
    for minutes, value in ((5, 0.0), (0, 1.0)):
        origin = {"ingested_at": NOON + timedelta(minutes=minutes), "offset": 7}
        two = interaction(
            choices=[completion(), completion(choice_index=1)], latency_ms=float(minutes)
        )
        store.append("interactions", to_table(interaction_rows(two, **origin)))
        store.append("feedback", to_table([feedback_row(feedback(value=value), **origin)]))
    connection = connect(store, rewards=ACCEPTED)

    rows = connection.execute("SELECT choice_index, latency_ms FROM interactions ORDER BY 1")
    assert rows.fetchall() == [(0, 0.0), (1, 0.0)]
    assert connection.execute('SELECT "value" FROM feedback').fetchall() == [(1.0,)]
    assert connection.execute("SELECT reward FROM rewards").fetchall() == [(1.0,), (1.0,)]


def test_a_promotion_reported_again_after_a_crash_is_read_once(tmp_path: Path) -> None:
    store = stored(tmp_path, [])
    row = PromotionRow(
        promotion_id="p",
        policy="assistant",
        version=2,
        action="promote",
        reason="",
        actor="controller",
        decided_at=NOON,
        ingest_date=NOON.date(),
    )
    store.append("promotions", to_table([row]))
    store.append("promotions", to_table([row]))

    rows = connect(store, rewards=ACCEPTED).execute("SELECT promotion_id FROM promotions")
    assert rows.fetchall() == [("p",)]


def test_views_at_pinned_versions_do_not_see_what_came_later(tmp_path: Path) -> None:
    store = stored(tmp_path, [interaction("i1"), feedback("f1")])
    pinned = store.versions()
    now = connect(store, rewards=ACCEPTED)
    store.append("interactions", to_table(interaction_rows(interaction("i2"))))
    store.append("feedback", to_table([feedback_row(feedback("f2", value=-1.0))]))
    then = connect(store, rewards=ACCEPTED, versions=pinned)

    for connection in (now, then):
        assert connection.execute("SELECT count(*) FROM interactions").fetchall() == [(1,)]
        assert connection.execute("SELECT reward FROM rewards").fetchall() == [(1.0,)]


def test_a_missing_version_is_named_in_the_error(tmp_path: Path) -> None:
    store = stored(tmp_path, [interaction()])

    with pytest.raises(ServiceUnavailable, match="open table interactions"):
        connect(store, rewards=ACCEPTED, versions={"interactions": 99})


def test_memory_and_threads_of_a_query_are_those_of_the_configuration(tmp_path: Path) -> None:
    limits = StoreConfig(query_memory_mib=128, query_threads=3)
    connection = connect(DeltaStore(str(tmp_path)), rewards=ACCEPTED, limits=limits)

    found = connection.execute("SELECT current_setting('threads'), current_setting('memory_limit')")
    assert found.fetchall() == [(3, "128.0 MiB")]


def test_a_query_that_does_not_fit_spills_even_where_it_may_read_nothing_else(
    tmp_path: Path,
) -> None:
    limits = StoreConfig(query_memory_mib=64, query_threads=1)
    connection = connect(DeltaStore(str(tmp_path)), rewards=ACCEPTED, limits=limits)
    connection.execute("SET enable_external_access = false")

    # Sorted text of 200 MB.
    sql = """SELECT count(*) FROM (
        SELECT * FROM (SELECT md5(i::VARCHAR) || repeat('x', 68) AS t FROM range(2000000) AS r(i))
        ORDER BY t LIMIT 1999999)"""
    assert connection.execute(sql).fetchall() == [(1_999_999,)]


def test_a_session_is_counted_per_tenant(tmp_path: Path) -> None:
    connection = views_of(
        tmp_path,
        interaction("i1", choices=[completion(), completion([1, 2, 3], choice_index=1)]),
        interaction("i2", served_at=after(5)),
        interaction("i3", tenant="globex", served_at=after(9)),
        interaction("shadow", arm="shadow", served_at=after(11)),
        feedback("f1", interaction_id="i1", choice_index=1, value=0.5),
        feedback("f2", interaction_id="i2", value=1.0),
        feedback("f3", interaction_id="shadow", value=0.0),
        rewards=ACCEPTED,
    )

    rows = connection.execute("FROM sessions ORDER BY tenant").fetchall()
    assert rows == [
        ("s1", "acme", 2, 3, 7, NOON, after(5), 2, 0.75),
        ("s1", "globex", 1, 1, 2, after(9), after(9), 0, None),
    ]
