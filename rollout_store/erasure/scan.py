"""Where traces of a person are left: every file of every table, row by row, and the logs.

This is both how rows to delete are found and, when it finds nothing, the proof that none is left.
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
from onlinerl.rollout_store.erasure.scope import Scope, TenantScope
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.deletion import Position
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.files import StoredFile, TableFiles, referenced

_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MIN_TELLING = 16
"""Characters from which an id is its own proof; a shorter one may be any word."""
_POSITION = ("topic", "partition", "ingested_at", "offset")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A file that holds something of the person."""

    table: str
    file: StoredFile
    positions: frozenset[Position]
    """Of the rows that do; empty for a log, for tables whose rows came from no event, and for a
    file that nobody can read, which may hold anything."""
    was_referenced: bool
    """Whether the newest version referred to it when the look began: then no commit is underway
    that is about to."""


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """Everything that was looked at, and what was found."""

    traces: tuple[Trace, ...]
    num_files: int
    num_bytes: int


class Needles:
    """Recognises what belongs to a scope, in ids and in free text."""

    def __init__(self, scope: Scope, *, digests: frozenset[str] = frozenset()) -> None:
        self._scope = scope
        self._digests = digests
        parts = list(scope.values())
        ids = {name for part in parts for name in part.interactions}
        named = {part.user.encode() for part in parts}
        named |= {name.encode() for name in ids if len(name) >= _MIN_TELLING}
        # Hashes and interaction ids are long and random: found anywhere they are a trace. There may
        # be very many ids, so those of the usual form are looked up instead of searched for.
        self._uuids = {name for name in named if _UUID.fullmatch(name)}
        self._others = sorted(named - self._uuids)
        # Session ids may be any word of a caller's: outside their columns only whole JSON strings.
        sessions = {name for part in parts for name in part.sessions}
        words = sessions | {name for name in ids if len(name) < _MIN_TELLING}
        self._quoted = sorted(
            {json.dumps(name, ensure_ascii=a).encode() for name in words for a in (True, False)}
        )
        self._keys = {name.encode() for name in sessions}

    def in_text(self, text: bytes) -> bool:
        """Whether a hash or an interaction id is anywhere in it."""
        if any(needle in text for needle in self._others):
            return True
        return bool(self._uuids) and not self._uuids.isdisjoint(_UUID.findall(text))

    def in_letter(self, letter: dict[str, Any]) -> bool:
        """Whether a dead letter names any of it."""
        payload: bytes = letter["payload"]
        if letter["key"] in self._keys or self.in_text(payload + b"\0" + (letter["key"] or b"")):
            return True
        return any(session in payload for session in self._quoted)

    def in_event(self, row: dict[str, Any]) -> bool:
        """Whether a row of `interactions` or `feedback` belongs to the person."""
        part = self._scope.get(row["tenant"])
        return part is not None and (_is_in(part, row) or self._is_known(row))

    def _is_known(self, row: dict[str, Any]) -> bool:
        """Whether it is, goes on from or is about an interaction that is known by its digest."""
        return bool(self._digests) and any(
            digest("interaction", tenant=row["tenant"], name=name) in self._digests
            for name in (row["interaction_id"], row.get("parent_id"))
            if name is not None
        )


def scan(
    store: DeltaStore,
    scope: Scope,
    *,
    unfinished_before: datetime,
    on_file: Callable[[], None] = lambda: None,
) -> Scanned:
    """Look through all files of all tables, those of the logs included.

    Args:
        store: Where the tables lie.
        scope: Who is looked for.
        unfinished_before: What a writer left unfinished before that time counts as a trace, for
            nobody can read what is in it.
        on_file: Told of every file that was read.

    Raises:
        ServiceUnavailable: the storage failed, or a file of the newest version is damaged.
    """
    users = {digest("user", tenant=tenant, name=part.user) for tenant, part in scope.items()}
    needles = Needles(scope, digests=interactions_of(store, users))
    traces: list[Trace] = []
    num_files = num_bytes = 0
    for table in TABLES:
        if not store.exists(table):
            continue
        files = TableFiles(store, table)
        needed = referenced(store, table)
        for file in files.all():
            if file.is_unfinished and file.modified_at > unfinished_before:
                continue  # its writer was told by then
            try:
                positions = _look(files, file, table=table, needles=needles)
            except FileNotFoundError:
                continue  # vacuumed since it was listed
            except pa.ArrowInvalid as error:
                if file.path in needed:
                    raise ServiceUnavailable(
                        f"{table}/{file.path} is damaged ({error}); restore it from a copy, or "
                        "delete its rows: nobody can tell whose they are"
                    ) from error
                positions = frozenset()
            if positions is not None:
                trace = Trace(
                    table=table, file=file, positions=positions,
                    was_referenced=file.path in needed,
                )  # fmt: skip
                traces.append(trace)
            num_files, num_bytes = num_files + 1, num_bytes + file.num_bytes
            on_file()
    return Scanned(traces=tuple(traces), num_files=num_files, num_bytes=num_bytes)


def _look(
    files: TableFiles, file: StoredFile, *, table: str, needles: Needles
) -> frozenset[Position] | None:
    """The positions of rows that are a trace; None when there is no trace in the file.

    Raises:
        pa.ArrowInvalid: it is damaged.
    """
    if file.is_unfinished:
        return frozenset()
    if not file.is_parquet:
        return frozenset() if needles.in_text(files.read(file)) else None
    with files.open(file) as opened:
        if file.is_log:
            return frozenset() if any(needles.in_text(_text(r)) for r in _rows(opened)) else None
        hits = [row for row in _rows(opened) if _is_hit(row, table=table, needles=needles)]
    if not hits:
        return None
    return frozenset(_position(row, file) for row in hits if _POSITION[-1] in row)


def _is_hit(row: dict[str, Any], *, table: str, needles: Needles) -> bool:
    if table == "dead_letters":
        return needles.in_letter(row)
    return (table in ("interactions", "feedback") and needles.in_event(row)) or needles.in_text(
        _text(row)
    )


def _is_in(part: TenantScope, row: dict[str, Any]) -> bool:
    return (
        row["user"] == part.user
        or row["session_id"] in part.sessions
        or row["interaction_id"] in part.interactions
        or row.get("parent_id") in part.interactions
    )


def _rows(opened: pa.NativeFile) -> Iterator[dict[str, Any]]:
    """Every row without its numbers: only text can name somebody. Positions are kept."""
    file = parquet.ParquetFile(opened)
    wanted = [
        column.path
        for column in map(file.schema.column, range(len(file.schema)))
        if column.physical_type == "BYTE_ARRAY" or column.path in _POSITION
    ]
    for batch in file.iter_batches(batch_size=4_096, columns=wanted):
        yield from batch.to_pylist()


def _text(row: dict[str, Any]) -> bytes:
    return json.dumps(row, default=_plain, ensure_ascii=False).encode(errors="replace")


def _plain(value: object) -> str:
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
