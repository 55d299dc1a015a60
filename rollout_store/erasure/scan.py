"""Finds every trace of a person: reads every file of every table, row by row, and the logs.

An erasure uses it to find the rows to delete. A scan that finds nothing is the proof that nothing
is left.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import parquet

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.erasure.erased import digest, interactions_of
from onlinerl.rollout_store.erasure.person_ids import IdsByTenant, PersonIds
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.deletion import Position
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.files import StoredFile, TableFiles, referenced

_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MIN_UNIQUE_LENGTH = 16
"""Characters from which an id counts as a trace wherever it occurs; a shorter one may be a word."""
_POSITION = ("topic", "partition", "ingested_at", "offset")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A file that holds something of the person."""

    table: str
    file: StoredFile
    positions: frozenset[Position]
    """Positions of the matching rows. Empty for logs, for tables that are not filled from events,
    and for unreadable files, which count as a match."""
    was_referenced: bool
    """Whether the newest version referred to the file when the scan began. If it did, no commit
    that adds the file can still be under way."""


@dataclass(frozen=True, kw_only=True)
class ScanResult:
    """The traces that a scan found, and how much it read."""

    traces: tuple[Trace, ...]
    num_files: int
    num_bytes: int


class TraceMatcher:
    """Recognises the ids of a person in columns and in free text.

    Args:
        ids: The ids to look for.
        digests: Digests of interactions that earlier erasures of the person found.
    """

    def __init__(self, ids: IdsByTenant, *, digests: frozenset[str] = frozenset()) -> None:
        self._ids = ids
        self._digests = digests
        parts = list(ids.values())
        interactions = {name for part in parts for name in part.interactions}
        unique = {part.user.encode() for part in parts}
        unique |= {name.encode() for name in interactions if len(name) >= _MIN_UNIQUE_LENGTH}
        # Hashes and interaction ids are long and random, so they are a trace wherever they occur.
        # There may be very many, so UUIDs are looked up in a set; only the rest is searched for.
        self._uuids = {name for name in unique if _UUID.fullmatch(name)}
        self._others = sorted(unique - self._uuids)
        # A caller may use any word as a session id, so outside of its column only a whole JSON
        # string matches.
        sessions = {name for part in parts for name in part.sessions}
        words = sessions | {name for name in interactions if len(name) < _MIN_UNIQUE_LENGTH}
        self._quoted = sorted(
            {json.dumps(name, ensure_ascii=a).encode() for name in words for a in (True, False)}
        )
        self._keys = {name.encode() for name in sessions}

    def in_text(self, text: bytes) -> bool:
        """Whether the text contains the user's hash or one of the interaction ids."""
        if any(name in text for name in self._others):
            return True
        return bool(self._uuids) and not self._uuids.isdisjoint(_UUID.findall(text))

    def in_dead_letter(self, row: dict[str, Any]) -> bool:
        """Whether the key or the payload of a dead letter contains one of the ids."""
        payload: bytes = row["payload"]
        if row["key"] in self._keys or self.in_text(payload + b"\0" + (row["key"] or b"")):
            return True
        return any(session in payload for session in self._quoted)

    def in_event(self, row: dict[str, Any]) -> bool:
        """Whether a row of `interactions` or `feedback` belongs to the person."""
        part = self._ids.get(row["tenant"])
        return part is not None and (_belongs_to(part, row) or self._has_known_digest(row))

    def _has_known_digest(self, row: dict[str, Any]) -> bool:
        """Whether the row is, extends or judges an interaction that is known by its digest."""
        return bool(self._digests) and any(
            digest("interaction", tenant=row["tenant"], name=name) in self._digests
            for name in (row["interaction_id"], row.get("parent_id"))
            if name is not None
        )


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A file to read."""

    table: str
    files: TableFiles
    file: StoredFile
    is_referenced: bool


def scan(
    store: DeltaStore,
    ids: IdsByTenant,
    *,
    unfinished_before: datetime,
    on_file: Callable[[], None] = lambda: None,
) -> ScanResult:
    """Search all files of all tables, including the logs.

    Args:
        store: Where the tables lie.
        ids: The ids of the person to look for.
        unfinished_before: An unfinished file that was last written before this time counts as a
            trace, because nobody can read what is in it.
        on_file: Called after every file that was read.

    Raises:
        ServiceUnavailable: the storage failed, or a file of the newest version is damaged.
    """
    users = {digest("user", tenant=tenant, name=part.user) for tenant, part in ids.items()}
    matcher = TraceMatcher(ids, digests=interactions_of(store, users))
    traces: list[Trace] = []
    num_files = num_bytes = 0
    for candidate in _files_to_read(store, unfinished_before=unfinished_before):
        try:
            trace = _trace_in(candidate, matcher)
        except FileNotFoundError:
            continue  # vacuumed since it was listed
        if trace is not None:
            traces.append(trace)
        num_files, num_bytes = num_files + 1, num_bytes + candidate.file.num_bytes
        on_file()
    return ScanResult(traces=tuple(traces), num_files=num_files, num_bytes=num_bytes)


def _files_to_read(store: DeltaStore, *, unfinished_before: datetime) -> Iterator[_Candidate]:
    for table in TABLES:
        if not store.exists(table):
            continue
        files = TableFiles(store, table)
        needed = referenced(store, table)
        for file in files.all():
            # A writer that began later already knows what it may not store.
            if not (file.is_unfinished and file.modified_at > unfinished_before):
                yield _Candidate(
                    table=table, files=files, file=file, is_referenced=file.path in needed
                )


def _trace_in(candidate: _Candidate, matcher: TraceMatcher) -> Trace | None:
    """The trace in one file, or None.

    Raises:
        FileNotFoundError: the file is gone.
        ServiceUnavailable: the file is damaged and the newest version needs it.
    """
    try:
        positions = _positions_in(candidate, matcher)
    except pa.ArrowInvalid as error:
        if candidate.is_referenced:
            raise ServiceUnavailable(
                f"{candidate.table}/{candidate.file.path} is damaged ({error}), so nobody can tell "
                "whose rows it holds; restore it from a copy, or delete its rows"
            ) from error
        positions = frozenset()
    if positions is None:
        return None
    return Trace(
        table=candidate.table,
        file=candidate.file,
        positions=positions,
        was_referenced=candidate.is_referenced,
    )


def _positions_in(candidate: _Candidate, matcher: TraceMatcher) -> frozenset[Position] | None:
    """The positions of the matching rows; None when there is no trace in the file.

    Raises:
        pa.ArrowInvalid: the file is damaged.
    """
    files, file, table = candidate.files, candidate.file, candidate.table
    if file.is_unfinished:
        return frozenset()
    if not file.is_parquet:
        return frozenset() if matcher.in_text(files.read(file)) else None
    with files.open(file) as opened:
        if file.is_log:
            has_match = any(matcher.in_text(_row_text(row)) for row in _text_rows(opened))
            return frozenset() if has_match else None
        matches = [row for row in _text_rows(opened) if _matches(row, table, matcher)]
    if not matches:
        return None
    return frozenset(_position(row, file) for row in matches if _POSITION[-1] in row)


def _matches(row: dict[str, Any], table: str, matcher: TraceMatcher) -> bool:
    if table == "dead_letters":
        return matcher.in_dead_letter(row)
    if table in ("interactions", "feedback") and matcher.in_event(row):
        return True
    return matcher.in_text(_row_text(row))


def _belongs_to(part: PersonIds, row: dict[str, Any]) -> bool:
    return (
        row["user"] == part.user
        or row["session_id"] in part.sessions
        or row["interaction_id"] in part.interactions
        or row.get("parent_id") in part.interactions
    )


def _text_rows(opened: pa.NativeFile) -> Iterator[dict[str, Any]]:
    """Every row with its text columns and its position; numbers cannot name a person."""
    file = parquet.ParquetFile(opened)
    columns = [
        column.path
        for column in map(file.schema.column, range(len(file.schema)))
        if column.physical_type == "BYTE_ARRAY" or column.path in _POSITION
    ]
    for batch in file.iter_batches(batch_size=4_096, columns=columns):
        yield from batch.to_pylist()


def _row_text(row: dict[str, Any]) -> bytes:
    return json.dumps(row, default=_as_text, ensure_ascii=False).encode(errors="replace")


def _as_text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _position(row: dict[str, Any], file: StoredFile) -> Position:
    folder = unquote(PurePosixPath(file.path).parent.name)
    return Position(
        ingest_date=date.fromisoformat(folder.removeprefix("ingest_date=")),
        topic=row["topic"],
        partition=row["partition"],
        ingested_at=row["ingested_at"],
        offset=row["offset"],
    )
