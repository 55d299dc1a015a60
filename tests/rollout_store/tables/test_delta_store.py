from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from onlinerl.errors import ConfigError, ServiceUnavailable, StoreConflict
from onlinerl.rollout_store.schema import TABLES, AuditRow, InteractionRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.rows import schema_of, to_table
from tests.events import NOON, interaction, interaction_rows


@pytest.fixture
def store(tmp_path: Path) -> DeltaStore:
    store = DeltaStore(str(tmp_path / "with a space" / "store"))
    store.create()
    return store


def audit(audit_id: str) -> pa.Table:
    row = AuditRow(
        audit_id=audit_id,
        actor="a",
        action="b",
        subject="c",
        acted_at=NOON,
        ingest_date=NOON.date(),
    )
    return to_table([row])


def step(version: int, expected: int | None, app_id: str = "app") -> list[Transaction]:
    return [Transaction(app_id=app_id, version=version, expected=expected)]


def ids(store: DeltaStore) -> list[str]:
    return sorted(store.dataset("audit").to_table(["audit_id"])["audit_id"].to_pylist())


def test_rows_and_number_are_stored_together(store: DeltaStore) -> None:
    version = store.append("audit", audit("a"), transactions=step(5, None))

    assert store.versions()["audit"] == version == 1
    assert store.transaction_version("audit", "app") == 5
    assert ids(store) == ["a"]


def test_a_number_can_be_stored_without_rows(store: DeltaStore) -> None:
    store.append("audit", audit("a").slice(0, 0), transactions=step(5, None))

    assert store.transaction_version("audit", "app") == 5
    assert ids(store) == []


@pytest.mark.parametrize("expected", [None, 3, 7], ids=["taken", "behind", "ahead"])
def test_a_commit_with_a_wrong_expected_number_stores_nothing(
    store: DeltaStore, expected: int | None
) -> None:
    store.append("audit", audit("a"), transactions=step(5, None))

    with pytest.raises(StoreConflict, match="stored as 5"):
        store.append("audit", audit("b"), transactions=step(9, expected))
    assert store.transaction_version("audit", "app") == 5
    assert ids(store) == ["a"]


def test_one_wrong_number_of_several_stores_nothing(store: DeltaStore) -> None:
    store.append("audit", audit("a"), transactions=step(5, None, "one"))

    with pytest.raises(StoreConflict):
        store.append("audit", audit("b"), transactions=step(6, 5, "one") + step(1, 4, "two"))
    assert store.transaction_versions("audit", ["one", "two"]) == {"one": 5, "two": None}


def test_of_many_writers_on_the_same_number_one_wins(store: DeltaStore) -> None:
    def attempt(name: str) -> bool:
        try:
            DeltaStore(store.root).append("audit", audit(name), transactions=step(1, None))
        except StoreConflict:
            return False
        return True

    names = [f"w{n}" for n in range(12)]
    with ThreadPoolExecutor(6) as pool:
        won = [name for name, ok in zip(names, pool.map(attempt, names), strict=True) if ok]

    assert len(won) == 1
    assert ids(store) == won


def test_writers_of_different_numbers_do_not_disturb_each_other(store: DeltaStore) -> None:
    def attempt(name: str) -> int:
        return DeltaStore(store.root).append("audit", audit(name), transactions=step(1, None, name))

    names = [f"w{n}" for n in range(12)]
    with ThreadPoolExecutor(6) as pool:
        versions = list(pool.map(attempt, names))

    assert sorted(versions) == list(range(1, 13))
    assert ids(store) == sorted(names)


def test_compaction_beside_appends_loses_nothing_and_fences_nobody(store: DeltaStore) -> None:
    store.append("audit", audit("w0"), transactions=step(1, None))

    def append() -> None:
        for number in range(1, 15):
            store.append("audit", audit(f"w{number}"), transactions=step(number + 1, number))

    def compact() -> None:
        for _ in range(10):
            DeltaTable(f"{store.root}/audit").optimize.compact()

    with ThreadPoolExecutor(2) as pool:
        for done in (pool.submit(append), pool.submit(compact)):
            done.result(timeout=60)

    assert ids(store) == sorted(f"w{n}" for n in range(15))


def test_a_number_stays_readable_after_later_commits(store: DeltaStore) -> None:
    store.append("audit", audit("a"), transactions=step(5, None))
    store.append("audit", audit("b"), transactions=step(1, None, "other"))
    table = DeltaTable(f"{store.root}/audit")
    table.create_checkpoint()
    for commit in sorted((Path(store.root) / "audit" / "_delta_log").glob("*[0-9].json"))[:-1]:
        commit.unlink()

    assert DeltaStore(store.root).transaction_version("audit", "app") == 5


def test_create_keeps_existing_rows(store: DeltaStore) -> None:
    store.append("audit", audit("a"))
    store.create()

    assert ids(store) == ["a"]
    assert set(store.versions()) == set(TABLES)


def test_two_processes_may_create_the_tables_at_once(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: DeltaStore(root).create(), range(4)))

    assert set(DeltaStore(root).versions()) == set(TABLES)


def test_tables_are_partitioned_by_day_and_have_no_deletion_vectors(store: DeltaStore) -> None:
    for table in TABLES:
        metadata = DeltaTable(f"{store.root}/{table}").metadata()

        assert metadata.partition_columns == ["ingest_date"]
        assert metadata.configuration["delta.enableDeletionVectors"] == "false"


def test_a_column_that_a_newer_schema_has_is_added_and_old_rows_stay(tmp_path: Path) -> None:
    root = tmp_path / "store"
    old = schema_of(AuditRow)
    old = old.remove(old.get_field_index("detail"))
    DeltaTable.create(str(root / "audit"), schema=old, partition_by=["ingest_date"])
    store = DeltaStore(str(root))
    store.append("audit", audit("old").drop_columns(["detail"]))
    store.create()
    store.append("audit", audit("new"))

    assert ids(store) == ["new", "old"]
    assert store.dataset("audit").to_table()["detail"].to_pylist() == [None, None]


def test_an_append_adds_a_column_that_the_table_lacks(tmp_path: Path) -> None:
    store = DeltaStore(str(tmp_path))
    old = schema_of(AuditRow)
    old = old.remove(old.get_field_index("detail"))
    DeltaTable.create(f"{store.root}/audit", schema=old, partition_by=["ingest_date"])
    store.append("audit", audit("a").drop_columns(["detail"]))
    store.append("audit", audit("b"), transactions=step(1, None))
    store.append("audit", audit("c").drop_columns(["detail"]))

    assert ids(store) == ["a", "b", "c"]
    assert store.transaction_version("audit", "app") == 1
    assert store.dataset("audit").to_table()["detail"].null_count == 3


def test_every_value_of_a_row_comes_back(store: DeltaStore) -> None:
    event = interaction(tags={"a": "b", "ü": ""}, sampling={"seed": 7, "stop": ["\n", "'"]})
    (row,) = interaction_rows(event, extra='{"x": 1}')
    store.append("interactions", to_table([row]))

    (stored,) = store.dataset("interactions").to_table().to_pylist()
    stored["tags"] = dict(stored["tags"])
    assert InteractionRow.model_validate(stored) == row


def test_a_pinned_version_stays_as_it_was(store: DeltaStore) -> None:
    version = store.append("audit", audit("a"))
    store.append("audit", audit("b"))

    assert store.dataset("audit", version=version).count_rows() == 1
    assert store.dataset("audit").count_rows() == 2


def test_a_missing_table_is_named_in_the_error(tmp_path: Path) -> None:
    store = DeltaStore(str(tmp_path))

    assert store.versions() == {}
    with pytest.raises(ServiceUnavailable, match="there is no table audit"):
        store.append("audit", audit("a"))


def test_a_storage_failure_is_a_retryable_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")

    with pytest.raises(ServiceUnavailable, match="cannot create table"):
        DeltaStore(str(tmp_path / "store")).create()


def test_an_empty_root_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"store\.root"):
        DeltaStore("")


def test_a_root_with_an_escape_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="percent sign"):
        DeltaStore(str(tmp_path / "a%20b"))
    DeltaStore(str(tmp_path / "100% ü#")).create()
