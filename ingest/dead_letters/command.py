"""`onlinerl dead-letters list | replay`."""

import contextlib
import heapq
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.ingest.dead_letters.replay import DeadLetter, Selection, find_dead_letters, replay
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import MAX_MESSAGE_BYTES, broker_errors, ensure_topics
from onlinerl.rollout_store.tables.delta_store import DeltaStore

if TYPE_CHECKING:
    from onlinerl.settings import Settings


def run_list(
    settings: "Settings", selection: Selection, *, limit: int, format: str = "table"
) -> int:
    """Show the newest letters of a selection. What they contain is never shown.

    Raises:
        ServiceUnavailable: there are no tables yet.
    """
    found = find_dead_letters(_store(settings), selection)
    newest = heapq.nlargest(limit, map(_shown, found), key=lambda row: row["ingested_at"])
    if format == "json":
        for row in newest:
            sys.stdout.write(json.dumps(row) + "\n")
    else:
        _show(newest)
    return 0


def run_replay(
    settings: "Settings", selection: Selection, *, everything: bool, dry_run: bool, actor: str
) -> int:
    """Send letters to their topics again, at most those that are there now.

    Raises:
        ConfigError: nothing says which letters.
        ServiceUnavailable: the broker or the tables do not answer.
    """
    if not (selection.is_narrow or everything):
        raise ConfigError("say which letters: --reason, --topic, --since, --id, or --all")
    store = _store(settings)
    # Of the table as it is now: a letter that comes back must not be sent again by this command.
    letters = find_dead_letters(store, selection)
    if dry_run:
        sys.stdout.write(f"{sum(1 for _ in letters)} letters would be sent again\n")
        return 0
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    with contextlib.closing(KafkaResender(settings.broker)) as resender:
        count = replay(
            store, letters, resender=resender, actor=actor, now=lambda: datetime.now(UTC)
        )
    sys.stdout.write(f"{count} letters were sent again; ingest will tell what became of them\n")
    return 0


class KafkaResender:
    """The `Resender` over kafka-python. A part of the records at a time is in the producer.

    Raises:
        ServiceUnavailable: no broker answers.
    """

    def __init__(self, broker: BrokerConfig) -> None:
        from kafka import KafkaProducer

        timeout_ms = int(broker.request_timeout_s * 1000)
        self._timeout_s = broker.request_timeout_s
        ensure_topics(broker)
        with broker_errors(f"produce to {broker.bootstrap}"):
            self._producer = KafkaProducer(
                bootstrap_servers=broker.addresses,
                client_id="onlinerl-dead-letters",
                acks="all",
                linger_ms=20,
                max_request_size=MAX_MESSAGE_BYTES + 1024**2,
                max_block_ms=timeout_ms,
                request_timeout_ms=max(timeout_ms // 2, 1),
                delivery_timeout_ms=timeout_ms,
                bootstrap_timeout_ms=timeout_ms,
                allow_auto_create_topics=False,
            )

    def send(self, records: Sequence[tuple[str, bytes | None, bytes]]) -> None:
        """See `Resender`."""
        with broker_errors("send dead letters again"):
            sent = [self._producer.send(topic, value, key=key) for topic, key, value in records]
            self._producer.flush(self._timeout_s)
            for future in sent:
                if not future.is_done:
                    raise ServiceUnavailable("the broker did not acknowledge in time")
                if future.exception is not None:
                    raise future.exception

    def close(self) -> None:
        """Disconnect without waiting."""
        self._producer.close(timeout=0)


def _store(settings: "Settings") -> DeltaStore:
    return DeltaStore(settings.store_root, settings.store.storage_options)


def _shown(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.digest,
        "ingested_at": letter.ingested_at.isoformat(),
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "size_bytes": len(letter.payload),
        "replayed": letter.is_replayed,
        "reason": letter.reason,
    }


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "stored", "topic", "partition", "offset", "bytes", "replayed", "reason")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 220, emoji=False).print(table, markup=False)
