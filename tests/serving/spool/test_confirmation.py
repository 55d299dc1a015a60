"""The spool keeps what it shipped until the tables hold it."""

import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.event_log import TABLE_OF, TopicIdPartition
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, INTERACTIONS_TOPIC, TABLES
from onlinerl.rollout_store.tables.delta_store import DeltaStore, Transaction
from onlinerl.rollout_store.tables.rows import schema_of
from onlinerl.serving.config import SpoolConfig
from onlinerl.serving.interaction.events import Record
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.spool.confirmation import Confirmation, StoredOffsets, stored_in
from onlinerl.serving.spool.log_writer import MemoryWriter
from onlinerl.serving.spool.queue import Spool
from onlinerl.serving.spool.segment_files import segment_numbers
from onlinerl.serving.spool.shipper import Shipper
from tests.waiting import until

CONFIG = SpoolConfig(
    topic_poll_s=0.02, ship_batch=3, ship_linger_s=0, segment_bytes=4096, confirm_s=0.02
)
RECORD_BYTES = 3000
"""After two records a segment is full."""


class Line:
    """Spool, shipper, log, and tables that say how far they are."""

    def __init__(self, folder: Path, stored: StoredOffsets) -> None:
        self.folder = folder
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.log = MemoryWriter()
        self.spool = Spool(folder, CONFIG, metrics=self.metrics)
        self.shipper = Shipper(
            self.spool, connect=self.log.connect, config=CONFIG, metrics=self.metrics
        )
        self.confirmation = Confirmation(
            self.spool, stored, every_s=CONFIG.confirm_s, metrics=self.metrics
        )
        self.shipper.start()

    def put(self, *numbers: int, topic: str = INTERACTIONS_TOPIC) -> None:
        for number in numbers:
            self.spool.put(Record(topic=topic, key=f"k{number}", value=b"x" * RECORD_BYTES))
            until(lambda: self.spool.is_drained)

    @property
    def num_segments(self) -> int:
        return len(segment_numbers(self.folder))

    def count(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"onlinerl_gateway_{name}", labels)
        return found or 0.0

    def close(self) -> None:
        self.confirmation.close()
        self.shipper.close(drain_s=0)
        self.spool.close(timeout_s=5)


@pytest.fixture
def store(tmp_path: Path) -> DeltaStore:
    return DeltaStore(str(tmp_path / "store"))


@pytest.fixture
def line(tmp_path: Path, store: DeltaStore) -> Iterator[Line]:
    line = Line(tmp_path / "spool", stored_in(store))
    yield line
    line.close()


def hold(
    store: DeltaStore, log: MemoryWriter, end: int, *, topic: str = INTERACTIONS_TOPIC
) -> None:
    """What ingest leaves: the next offset, in a commit to the topic's table."""
    store.create()
    table = TABLE_OF[topic]
    app_id = TopicIdPartition(topic, log.topic_ids()[topic], 0).app_id
    offset = Transaction(
        app_id=app_id, version=end, expected=store.transaction_version(table, app_id)
    )
    store.append(table, schema_of(TABLES[table]).empty_table(), transactions=[offset])


def test_what_the_tables_hold_is_dropped_and_the_rest_is_shipped_again(
    line: Line, store: DeltaStore
) -> None:
    line.put(*range(8))
    line.put(8, 9, topic=FEEDBACK_TOPIC)
    hold(store, line.log, 4)
    line.confirmation.start()
    until(lambda: line.count("spool_dropped_segments_total", reason="confirmed") >= 1)
    line.log.come_back_empty()
    until(lambda: line.count("spool_rewinds_total") == 1 and line.spool.is_drained)
    until(lambda: len(line.log.records) >= 6)

    shipped = [record.key for record in line.log.records]
    assert {f"k{n}" for n in range(4, 10)} <= set(shipped)
    assert "k0" not in shipped
    assert line.count("events_lost_total") == 0


def test_a_table_that_lags_behind_the_other_keeps_its_own(line: Line, store: DeltaStore) -> None:
    line.put(0, 1, 2)
    line.put(3, 4, 5, topic=FEEDBACK_TOPIC)
    before = line.num_segments
    hold(store, line.log, 3)
    line.confirmation.look()
    until(lambda: line.count("spool_dropped_segments_total", reason="confirmed") >= 1)
    kept = line.num_segments
    hold(store, line.log, 3, topic=FEEDBACK_TOPIC)
    line.confirmation.look()
    until(lambda: line.num_segments <= 1)

    assert before > kept > 1


def test_without_tables_everything_is_kept(line: Line) -> None:
    line.put(*range(6))
    line.confirmation.look()
    line.spool.prune()

    assert line.num_segments >= 3
    assert line.count("spool_confirmations_total", outcome="ok") == 1


def test_tables_that_are_away_confirm_nothing_and_are_asked_again(tmp_path: Path) -> None:
    faults = [ServiceUnavailable("away"), RuntimeError("a bug")]

    def stored(places: Collection[TopicIdPartition]) -> Mapping[TopicIdPartition, int]:
        if faults:
            raise faults.pop()
        return dict.fromkeys(places, 100)

    line = Line(tmp_path, stored)
    line.put(*range(6))
    line.confirmation.start()
    until(lambda: line.num_segments <= 1)
    line.close()

    assert line.count("spool_confirmations_total", outcome="failed") == 2


@pytest.mark.parametrize(
    ("fault", "has_traceback"),
    [(ServiceUnavailable("away"), False), (OSError("away"), False), (TypeError("a bug"), True)],
)
def test_only_unexpected_fault_shows_its_traceback_and_each_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Exception, has_traceback: bool
) -> None:
    def stored(_: Collection[TopicIdPartition]) -> Mapping[TopicIdPartition, int]:
        raise fault

    line = Line(tmp_path, stored)
    line.put(0)
    for _ in range(3):
        line.confirmation.look()
    line.close()

    (entry,) = [each for each in caplog.records if each.name.endswith("confirmation")]
    assert (entry.exc_info is not None) == has_traceback
    assert line.count("spool_confirmations_total", outcome="failed") == 3


def test_tables_that_hang_hold_up_nothing(tmp_path: Path) -> None:
    release, asked = threading.Event(), threading.Event()

    def stored(_: Collection[TopicIdPartition]) -> Mapping[TopicIdPartition, int]:
        asked.set()
        release.wait(30)
        return {}

    line = Line(tmp_path, stored)
    line.put(0)
    line.confirmation.start()
    assert asked.wait(60)
    line.put(1, 2)
    line.close()
    release.set()

    assert [record.key for record in line.log.records] == ["k0", "k1", "k2"]
