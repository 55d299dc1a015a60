"""Finds dead letters, and sends them to their topics again once their cause is mended.

A replay puts the bytes of a dead letter into its topic again, unchanged and under its key. Ingest
reads them like any other record: an event that is already stored is recognised by its id, and one
that is still broken becomes another dead letter. A replay is recorded in the table `audit`, so that
the same dead letter is not sent twice. After a crash between sending and recording it is sent once
more, which does no harm.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import pyarrow.compute as pc

from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.delta_store import DeltaStore

ACTION = "replay dead letters"
"""The action of a replay in the table `audit`; its detail lists the digests of the dead letters."""

_BATCH_ROWS = 256
_CHUNK_BYTES = 8 * 1024**2
_CHUNK_ROWS = 500


@dataclass(frozen=True)
class DeadLetter:
    """One dead letter, and whether it was replayed."""

    digest: str
    """Identifies the dead letter: a digest over its position, payload, and time of storage."""
    topic: str
    partition: int
    offset: int
    reason: str
    ingested_at: datetime
    key: bytes | None
    payload: bytes
    is_replayed: bool


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Selects dead letters; every field that is not None must match."""

    reason: str | None = None
    """Beginning of the reason: a kind such as `spans`, or more."""
    topic: str | None = None
    """Topic of the record."""
    since: datetime | None = None
    """Stored at this time or later."""
    digest: str | None = None
    """Beginning of the digest."""
    with_replayed: bool = False
    """Whether dead letters that were already replayed are selected too."""

    @property
    def is_narrow(self) -> bool:
        """Whether at least one field narrows the selection."""
        return (self.reason, self.topic, self.since, self.digest) != (None, None, None, None)


class Resender(Protocol):
    """Appends records to the log."""

    def send(self, records: Sequence[tuple[str, bytes | None, bytes]]) -> None:
        """Send records and return when all are acknowledged.

        Args:
            records: Topic, key and value of each.

        Raises:
            ServiceUnavailable: The log did not acknowledge all; it may hold some of them.
        """
        ...


def find_dead_letters(store: DeltaStore, selection: Selection) -> Iterator[DeadLetter]:
    """The dead letters of a selection, read a few at a time, in no particular order.

    Raises:
        ServiceUnavailable: There are no tables yet, or the storage failed.
    """
    replayed = replayed_ids(store)
    scanner = store.dataset("dead_letters").scanner(
        filter=None if selection.since is None else pc.field("ingested_at") >= selection.since,
        batch_size=_BATCH_ROWS,
        batch_readahead=2,
        fragment_readahead=1,
    )
    for batch in scanner.to_batches():
        for row in batch.to_pylist():
            dead_letter = _dead_letter(row, replayed)
            if _is_selected(dead_letter, selection):
                yield dead_letter


def replay(
    store: DeltaStore,
    dead_letters: Iterator[DeadLetter],
    *,
    resender: Resender,
    actor: str,
    now: Callable[[], datetime],
) -> int:
    """Send dead letters again and record it, a bounded number at a time; returns how many.

    Args:
        store: Holds the table `audit`, in which the replay is recorded.
        dead_letters: The dead letters to send, each of them once.
        resender: Sends them to the log.
        actor: Who asks, for the record.
        now: The time for the record.

    Raises:
        ServiceUnavailable: The log or the storage failed. Recorded dead letters were sent.
    """
    count = 0
    for chunk in _chunks(dead_letters):
        resender.send([(one.topic, one.key, one.payload) for one in chunk])
        record_act(
            store,
            actor=actor,
            action=ACTION,
            subject=f"{len(chunk)} letters of {', '.join(sorted({one.topic for one in chunk}))}",
            detail={"letters": [one.digest for one in chunk]},
            at=now(),
        )
        count += len(chunk)
    return count


def replayed_ids(store: DeltaStore) -> frozenset[str]:
    """Digests of the dead letters that were already replayed."""
    acts = store.dataset("audit").scanner(
        columns=["detail"], filter=pc.field("action") == ACTION, batch_size=_BATCH_ROWS
    )
    details = [text for batch in acts.to_batches() for text in batch["detail"].to_pylist()]
    return frozenset(digest for text in details for digest in json.loads(text)["letters"])


def _dead_letter(row: dict[str, Any], replayed: frozenset[str]) -> DeadLetter:
    names = ("topic", "partition", "offset", "reason", "ingested_at", "key", "payload")
    place = f"{row['topic']}/{row['partition']}/{row['offset']}/{row['ingested_at'].isoformat()}/"
    digest = hashlib.sha256(place.encode() + row["payload"]).hexdigest()[:24]
    fields = {name: row[name] for name in names}
    return DeadLetter(digest=digest, is_replayed=digest in replayed, **fields)


def _is_selected(dead_letter: DeadLetter, selection: Selection) -> bool:
    return (
        (selection.with_replayed or not dead_letter.is_replayed)
        and dead_letter.reason.startswith(selection.reason or "")
        and selection.topic in (None, dead_letter.topic)
        and dead_letter.digest.startswith(selection.digest or "")
    )


def _chunks(dead_letters: Iterator[DeadLetter]) -> Iterator[list[DeadLetter]]:
    chunk: list[DeadLetter] = []
    size_bytes = 0
    for dead_letter in dead_letters:
        chunk.append(dead_letter)
        size_bytes += len(dead_letter.payload)
        if len(chunk) == _CHUNK_ROWS or size_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk
