from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.rollout_store.schema import InteractionRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.views.connection import connect
from onlinerl.rollout_store.views.scope import Scope
from onlinerl.rollout_store.views.window import read_window
from tests.events import after, completion, interaction, interaction_rows
from tests.rollout_store.views_of import stored

COLUMNS = ["interaction_id", "choice_index", "latency_ms"]


def read(store: DeltaStore, scope: Scope, columns: list[str] = COLUMNS) -> list[tuple[object, ...]]:
    found = [
        tuple(row.values())
        for batch in read_window(store, scope, columns=columns)
        for row in batch.to_pylist()
    ]
    return sorted(found, key=str)


def test_a_window_is_the_completions_in_scope_with_every_column(tmp_path: Path) -> None:
    two = [completion(), completion([9], choice_index=1)]
    store = stored(
        tmp_path, [interaction("i1", choices=two), interaction("i2", served_at=after(5))]
    )

    batches = list(read_window(store, Scope(until=after(5))))
    assert batches[0].schema.names == list(InteractionRow.model_fields)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert [row["completion_token_ids"] for row in rows] == [[7, 8], [9]]


@pytest.mark.parametrize(
    ("scope", "found"),
    [
        (Scope(), ["i1", "i2", "i3"]),
        (Scope(since=after(1)), ["i2", "i3"]),
        (Scope(since=after(1), until=after(2)), ["i2"]),
        (Scope(policy="other"), ["i3"]),
        (Scope(interaction_ids=["i1", "i9"]), ["i1"]),
        (Scope(interaction_ids=[]), []),
    ],
)
def test_time_policy_and_ids_choose_rows(tmp_path: Path, scope: Scope, found: list[str]) -> None:
    events = [
        interaction("i1"),
        interaction("i2", served_at=after(1)),
        interaction("i3", served_at=after(2), policy="other"),
    ]

    rows = read(stored(tmp_path, events), scope, ["interaction_id"])
    assert [row[0] for row in rows] == found


def test_a_row_stored_twice_is_read_once_and_the_first_counts(tmp_path: Path) -> None:
    store = stored(tmp_path, [])
    for minutes, offset in ((5, 7), (0, 9), (0, 8)):
        event = interaction(latency_ms=float(offset))
        rows = interaction_rows(event, ingested_at=after(minutes), offset=offset)
        store.append("interactions", to_table(rows))

    assert read(store, Scope()) == [("i1", 0, 8.0)]


def test_a_pinned_version_is_read_as_it_was(tmp_path: Path) -> None:
    store = stored(tmp_path, [interaction("i1")])
    then = store.versions()
    store.append("interactions", to_table(interaction_rows(interaction("i2"))))

    batches = read_window(store, Scope(), columns=["interaction_id"], versions=then)
    assert [row for batch in batches for row in batch.to_pylist()] == [{"interaction_id": "i1"}]


def test_an_unknown_column_and_a_missing_table_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column tokens"):
        read_window(stored(tmp_path, []), Scope(), columns=["tokens"])
    with pytest.raises(ServiceUnavailable, match="there is no table"):
        read_window(DeltaStore(str(tmp_path / "none")), Scope())


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    copies=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 3)), max_size=10
    ),
    since=st.integers(0, 4),
    length=st.integers(0, 4),
)
def test_a_window_has_the_rows_of_the_view(
    tmp_path_factory: pytest.TempPathFactory,
    copies: list[tuple[int, int, int]],
    since: int,
    length: int,
) -> None:
    store = stored(tmp_path_factory.mktemp("tables"), [])
    for offset, (number, choice, minute) in enumerate(copies):
        event = interaction(
            f"i{number}",
            served_at=after(number),
            latency_ms=float(offset),
            choices=[completion(choice_index=choice)],
        )
        rows = interaction_rows(event, ingested_at=after(minute), offset=offset)
        store.append("interactions", to_table(rows))
    scope = Scope(since=after(since), until=after(since + length))

    with connect(store, rewards=RewardsConfig(), scope=scope) as connection:
        sql = f"SELECT {', '.join(COLUMNS)} FROM interactions WHERE {scope.condition()}"
        assert read(store, scope) == sorted(connection.execute(sql).fetchall(), key=str)
