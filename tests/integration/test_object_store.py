"""The tables in a bucket of a real S3 server, through the same code as in a folder."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from deltalake import CommitProperties, write_deltalake
from deltalake import Transaction as DeltaTransaction
from deltalake.exceptions import CommitFailedError

from onlinerl.errors import StoreConflict
from onlinerl.ingest.batches.sorting import ROUTES
from onlinerl.ingest.committing.writer import STEPS
from onlinerl.ingest.event_log.log import LogRecord, MemoryLog
from onlinerl.rollout_store.config import MetricConfig, RewardsConfig
from onlinerl.rollout_store.event_log import ALL_TOPICS, Topic
from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC, TABLES
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.views.connection import connect
from onlinerl.rollout_store.views.scope import Scope
from tests.events import NOON, feedback, feedback_row, interaction, interaction_rows
from tests.ingest.world import Crash, World
from tests.object_store import Bucket, s3_bucket
from tests.rollout_store.tables.test_delta_store import audit, ids, step
from tests.rollout_store.views.test_segments import turn
from tests.rollout_store.views_of import Event

pytestmark = pytest.mark.integration

REWARDS = RewardsConfig(metrics=(MetricConfig(name="accepted"),))


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with s3_bucket() as bucket:
        yield bucket


@pytest.fixture
def store(bucket: Bucket, request: pytest.FixtureRequest) -> DeltaStore:
    name = request.node.name.replace("[", "-").replace("]", "")
    store = DeltaStore(f"{bucket.root}/{name}", bucket.storage_options)
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


def test_the_second_commit_on_one_version_is_refused(store: DeltaStore) -> None:
    """Both writers loaded the same version before either of them wrote."""
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


@pytest.mark.parametrize("step", STEPS)
def test_ingest_that_dies_at_any_step_stores_every_row_once(store: DeltaStore, step: str) -> None:
    world = World(MemoryLog(ALL_TOPICS, partitions=1, max_poll_records=4), store)
    events: list[Event] = [
        interaction("i1"),
        interaction("i2"),
        feedback("f1"),
        interaction("i3"),
    ]
    for event in events:
        world.send(event)

    def die(at: str) -> None:
        if at == step:
            raise Crash

    with pytest.raises(Crash):
        world.ingest(die)
    world.ingest()
    world.ingest()

    assert world.counts("interactions", "interaction_id") == {"i1": 1, "i2": 1, "i3": 1}
    assert world.counts("feedback", "feedback_id") == {"f1": 1}


def test_of_two_ingesters_the_older_one_is_fenced(store: DeltaStore) -> None:
    log = MemoryLog(ALL_TOPICS, partitions=1, max_poll_records=4)
    world = World(log, store)
    older, newer = world.writer(), world.writer()
    topics = {INTERACTIONS_TOPIC: Topic(INTERACTIONS_TOPIC, "t", (0,))}
    value = interaction("i1").model_dump_json().encode()
    record = LogRecord(INTERACTIONS_TOPIC, 0, 0, None, value)
    for writer in (older, newer):
        writer.claim()
        writer.align(topics, [(INTERACTIONS_TOPIC, 0)])

    with pytest.raises(StoreConflict):
        older.write(ROUTES[0], [record])
    newer.write(ROUTES[0], [record])
    assert world.column("interactions", "interaction_id") == ["i1"]
