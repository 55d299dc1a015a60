"""`onlinerl dead-letters list | replay`."""

import contextlib
import heapq
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

from onlinerl.errors import ConfigError, ServiceUnavailable
from onlinerl.ingest.dead_letters.replay import (
    DeadLetter,
    Resender,
    Selection,
    find_dead_letters,
    replay,
)
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import MAX_MESSAGE_BYTES, broker_errors, ensure_topics
from onlinerl.rollout_store.tables.delta_store import DeltaStore


def run_list(store: DeltaStore, selection: Selection, *, limit: int, format: str = "table") -> int:
    """Print the newest dead letters of a selection, without their keys and payloads.

    Args:
        store: Holds the table `dead_letters`.
        selection: Which dead letters.
        limit: Most dead letters to print.
        format: `table` or `json`.

    Raises:
        ServiceUnavailable: There are no tables yet.
    """
    selected = find_dead_letters(store, selection)
    newest = heapq.nlargest(limit, map(_row, selected), key=lambda row: row["ingested_at"])
    if format == "json":
        for row in newest:
            sys.stdout.write(json.dumps(row) + "\n")
    else:
        _print_table(newest)
    return 0


def run_replay(
    store: DeltaStore,
    selection: Selection,
    *,
    broker: BrokerConfig,
    everything: bool,
    dry_run: bool,
    actor: str,
) -> int:
    """Send dead letters to their topics again, and print how many.

    Args:
        store: Holds the table `dead_letters`.
        selection: Which dead letters.
        broker: Where they are sent.
        everything: Allows a selection that selects all of them.
        dry_run: Only count them.
        actor: Who asks, for the table `audit`.

    Raises:
        ConfigError: The selection is empty and `everything` is not set.
        ServiceUnavailable: The broker or the tables do not answer.
    """
    if not (selection.is_narrow or everything):
        raise ConfigError(
            "select the dead letters to replay with --reason, --topic, --since or --id, or pass "
            "--all"
        )
    # Read from the table as it is now: a dead letter that comes back is not sent a second time.
    dead_letters = find_dead_letters(store, selection)
    if dry_run:
        sys.stdout.write(f"{sum(1 for _ in dead_letters)} dead letters would be sent again\n")
        return 0
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    with contextlib.closing(KafkaResender(broker)) as resender:
        count = replay(
            store, dead_letters, resender=resender, actor=actor, now=lambda: datetime.now(UTC)
        )
    sys.stdout.write(
        f"{count} dead letters were sent again; ingest stores them, or lists them again if they "
        "are still broken\n"
    )
    return 0


class KafkaResender(Resender):
    """Sends dead letters through kafka-python.

    Args:
        broker: Addresses and timeouts.

    Raises:
        ServiceUnavailable: No broker answers.
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

    @override
    def send(self, records: Sequence[tuple[str, bytes | None, bytes]]) -> None:
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


def _row(dead_letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": dead_letter.digest,
        "ingested_at": dead_letter.ingested_at.isoformat(),
        "topic": dead_letter.topic,
        "partition": dead_letter.partition,
        "offset": dead_letter.offset,
        "size_bytes": len(dead_letter.payload),
        "replayed": dead_letter.is_replayed,
        "reason": dead_letter.reason,
    }


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "stored", "topic", "partition", "offset", "bytes", "replayed", "reason")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 220, emoji=False).print(table, markup=False)
