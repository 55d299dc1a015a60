"""A log, tables and an ingester for tests, which drive it step by step."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from onlinerl.ingest.committing.writer import TableWriter
from onlinerl.ingest.config import IngestConfig
from onlinerl.ingest.event_log.log import MemoryLog
from onlinerl.ingest.loop.ingester import Ingester
from onlinerl.rollout_store.event_log import ALL_TOPICS
from onlinerl.rollout_store.schema import (
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    FeedbackEvent,
    InteractionEvent,
)
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from tests.events import NOON


class Crash(BaseException):
    """Ends an ingester as a kill would. No code of ours may catch it."""


def no_fault(step: str) -> None:
    """Let every step pass."""


@dataclass
class World:
    """The log and the tables, which outlive every ingester."""

    log: MemoryLog
    store: DeltaStore
    vocab_size: int = 0
    now: Callable[[], datetime] = lambda: NOON

    def send(self, event: InteractionEvent | FeedbackEvent, *, partition: int = 0) -> None:
        """Append an event to its topic."""
        is_interaction = isinstance(event, InteractionEvent)
        topic = INTERACTIONS_TOPIC if is_interaction else FEEDBACK_TOPIC
        self.log.produce(topic, event.model_dump_json().encode(), partition=partition)

    def send_raw(self, value: bytes, *, topic: str = INTERACTIONS_TOPIC) -> None:
        """Append any bytes to a topic."""
        self.log.produce(topic, value)

    def writer(
        self, fault: Callable[[str], None] = no_fault, *, exclusive: bool = True
    ) -> TableWriter:
        """The writer of a new process."""
        return TableWriter(
            self.store,
            recent_ids=1000,
            now=self.now,
            exclusive=exclusive,
            vocab_size=self.vocab_size,
            fault=fault,
        )

    def ingest(self, fault: Callable[[str], None] = no_fault) -> None:
        """Run a new process that writes all records of the log and ends."""
        # Buffers are so small that every poll becomes a batch.
        config = IngestConfig(
            max_batch_rows=3, max_batch_bytes=1024, max_buffered_bytes=1024, check_interval_s=0.001
        )
        ingester = Ingester(lambda: self.log, writer=self.writer(fault), config=config)
        ingester.run(threading.Event(), once=True)

    def column(self, table: str, column: str) -> list[object]:
        """All stored values of a column, including repeats, sorted."""
        values: list[object] = self.store.dataset(table).to_table([column])[column].to_pylist()
        return sorted(values, key=repr)

    def counts(self, table: str, column: str) -> Counter[object]:
        """How often each value of a column is stored."""
        return Counter(self.column(table, column))


def make_world(folder: Path, *, partitions: int = 1) -> World:
    """An empty log and empty tables."""
    store = DeltaStore(str(folder / "a store"))
    store.create()
    return World(MemoryLog(ALL_TOPICS, partitions=partitions, max_poll_records=4), store)
