"""Dead letters: which there are, and bringing them back after what broke them was mended.

A replay puts the bytes of a letter into its topic again, unchanged and under its key. Ingest then
reads them like any other record: an event that is stored already is recognised by its id, one that
is still broken becomes another letter. What was replayed is an act in the table `audit`, so that it
is not replayed again; a crash between the two replays it once more, which does no harm.
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
"""Of the table `audit`; the detail of such an act lists the ids of the letters."""

_BATCH_ROWS = 256
_CHUNK_BYTES = 8 * 1024**2
_CHUNK_LETTERS = 500


@dataclass(frozen=True)
class DeadLetter:
    """One dead letter and whether it was replayed."""

    digest: str
    """Digest over where it lay, when it was stored and what it is."""
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
    """Which letters; everything that is not None has to hold."""

    reason: str | None = None
    """The reason begins with this: a kind like `spans`, or more."""
    topic: str | None = None
    since: datetime | None = None
    """Stored at or after."""
    digest: str | None = None
    """Its id begins with this."""
    with_replayed: bool = False
    """Also letters that were replayed already."""

    @property
    def is_narrow(self) -> bool:
        """Whether it says anything about which letters."""
        return (self.reason, self.topic, self.since, self.digest) != (None, None, None, None)


class Resender(Protocol):
    """Puts records into the log."""

    def send(self, records: Sequence[tuple[str, bytes | None, bytes]]) -> None:
        """Topic, key and value of each; returns when all are acknowledged.

        Raises:
            ServiceUnavailable: some may have been taken.
        """
        ...


def find_dead_letters(store: DeltaStore, selection: Selection) -> Iterator[DeadLetter]:
    """The letters of a selection, read a few at a time, in no particular order.

    Raises:
        ServiceUnavailable: there are no tables yet, or the storage failed.
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
            letter = _letter(row, replayed)
            if _is_selected(letter, selection):
                yield letter


def replay(
    store: DeltaStore,
    letters: Iterator[DeadLetter],
    *,
    resender: Resender,
    actor: str,
    now: Callable[[], datetime],
) -> int:
    """Send letters again and record it, a bounded number at a time; returns how many.

    Args:
        store: Its table `audit` is where it is recorded.
        letters: To send; none of them may be sent twice.
        resender: The log.
        actor: Who asks.
        now: The time for the record.

    Raises:
        ServiceUnavailable: the log or the storage failed; what was recorded is done.
    """
    count = 0
    for chunk in _chunks(letters):
        resender.send([(letter.topic, letter.key, letter.payload) for letter in chunk])
        record_act(
            store,
            actor=actor,
            action=ACTION,
            subject=f"{len(chunk)} letters of {', '.join(sorted({one.topic for one in chunk}))}",
            detail={"letters": [letter.digest for letter in chunk]},
            at=now(),
        )
        count += len(chunk)
    return count


def replayed_ids(store: DeltaStore) -> frozenset[str]:
    """Ids of the letters that were replayed."""
    acts = store.dataset("audit").scanner(
        columns=["detail"], filter=pc.field("action") == ACTION, batch_size=_BATCH_ROWS
    )
    details = [text for batch in acts.to_batches() for text in batch["detail"].to_pylist()]
    return frozenset(letter for text in details for letter in json.loads(text)["letters"])


def _letter(row: dict[str, Any], replayed: frozenset[str]) -> DeadLetter:
    names = ("topic", "partition", "offset", "reason", "ingested_at", "key", "payload")
    place = f"{row['topic']}/{row['partition']}/{row['offset']}/{row['ingested_at'].isoformat()}/"
    digest = hashlib.sha256(place.encode() + row["payload"]).hexdigest()[:24]
    fields = {name: row[name] for name in names}
    return DeadLetter(digest=digest, is_replayed=digest in replayed, **fields)


def _is_selected(letter: DeadLetter, selection: Selection) -> bool:
    return (
        (selection.with_replayed or not letter.is_replayed)
        and letter.reason.startswith(selection.reason or "")
        and selection.topic in (None, letter.topic)
        and letter.digest.startswith(selection.digest or "")
    )


def _chunks(letters: Iterator[DeadLetter]) -> Iterator[list[DeadLetter]]:
    chunk: list[DeadLetter] = []
    size_bytes = 0
    for letter in letters:
        chunk.append(letter)
        size_bytes += len(letter.payload)
        if len(chunk) == _CHUNK_LETTERS or size_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk
