"""The tables in a bucket of a real S3 server, through the same code as in a folder."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from deltalake import CommitProperties, write_deltalake
from deltalake import Transaction as DeltaTransaction
from deltalake.exceptions import CommitFailedError

from onlinerl.errors import StoreConflict
from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from onlinerl.rollout_store.rows import to_table
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.scope import Scope
from onlinerl.rollout_store.store import DeltaStore
from onlinerl.rollout_store.views import connect
from tests.events import NOON, feedback, feedback_row, interaction, interaction_rows
from tests.object_store import Bucket, s3_bucket
from tests.rollout_store.test_segment_view import turn
from tests.rollout_store.test_store import audit, ids, step

pytestmark = pytest.mark.integration

REWARDS = RewardsConfig(metrics=(MetricConfig(name="accepted"),))


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with s3_bucket() as bucket:
        yield bucket


@pytest.fixture
def store(bucket: Bucket, request: pytest.FixtureRequest) -> DeltaStore:
    store = DeltaStore(f"{bucket.root}/{request.node.name}", bucket.storage_options)
    store.create()
    return store


def test_tables_are_created_and_rows_come_back(store: DeltaStore) -> None:
    store.create()
    version = store.append("audit", audit("a"), transactions=step(5, None))

    assert set(store.versions()) == set(TABLES)
    assert store.transaction_version("audit", "app") == 5
    assert ids(store) == ["a"]
    store.append("audit", audit("b"))
    assert store.dataset("audit", version=version).count_rows() == 1


def test_the_views_read_a_bucket_as_they_read_a_folder(store: DeltaStore) -> None:
    for day, event in enumerate([turn(1), turn(2), interaction("i9", session_id="s9")]):
        origin = {"ingested_at": NOON, "ingest_date": (NOON + timedelta(days=day)).date()}
        store.append("interactions", to_table(interaction_rows(event, **origin)))
    store.append("feedback", to_table([feedback_row(feedback(interaction_id="i2"))]))

    segments = "SELECT segment_id, token_ids FROM segments ORDER BY 1"
    with connect(store, rewards=REWARDS) as connection:
        assert connection.execute(segments).fetchall() == [
            ("i1:0", [1, 2, 3, 7, 8, 2, 7, 8]),
            ("i9:0", [1, 2, 3, 7, 8]),
        ]
        rewards = connection.execute("SELECT interaction_id, reward FROM rewards")
        assert rewards.fetchall() == [("i2", 1.0)]
    with connect(store, rewards=REWARDS, scope=Scope(interaction_ids=["i9"])) as connection:
        assert connection.execute(segments).fetchall() == [("i9:0", [1, 2, 3, 7, 8])]


def test_of_many_writers_on_the_same_number_one_wins(bucket: Bucket, store: DeltaStore) -> None:
    def attempt(name: str) -> bool:
        try:
            other = DeltaStore(store.root, bucket.storage_options)
            other.append("audit", audit(name), transactions=step(1, None))
        except StoreConflict:
            return False
        return True

    names = [f"w{n}" for n in range(6)]
    with ThreadPoolExecutor(3) as pool:
        won = [name for name, ok in zip(names, pool.map(attempt, names), strict=True) if ok]

    assert len(won) == 1
    assert ids(store) == won


def test_the_bucket_itself_refuses_the_second_commit_on_one_version(store: DeltaStore) -> None:
    """Both writers have passed every check before either writes: only a conditional put is left."""
    first, second = store.delta("audit"), store.delta("audit")
    claim = CommitProperties(app_transactions=[DeltaTransaction("app", 1)])
    write_deltalake(first, audit("a"), mode="append", commit_properties=claim)

    with pytest.raises(CommitFailedError):
        write_deltalake(second, audit("b"), mode="append", commit_properties=claim)
    assert ids(store) == ["a"]


def test_writers_of_different_numbers_lose_nothing(bucket: Bucket, store: DeltaStore) -> None:
    def append(name: str) -> int:
        other = DeltaStore(store.root, bucket.storage_options)
        return other.append("audit", audit(name), transactions=step(1, None, name))

    names = [f"w{n}" for n in range(6)]
    with ThreadPoolExecutor(3) as pool:
        versions = list(pool.map(append, names))

    assert ids(store) == sorted(names)
    assert len(set(versions)) == len(names)
