"""What was erased and must not come back, kept as digests in the table `erased`.

A broker may still hold an event of an erased person, and the gateway ships its tail again to a
broker that came back empty. Ingest asks here before it stores anything.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from onlinerl.rollout_store.schema import ErasedRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table

TABLE = "erased"
Kind = Literal["user", "session", "interaction"]

_COLUMNS: dict[Kind, str] = {
    "user": "user",
    "session": "session_id",
    "interaction": "interaction_id",
}
"""Column that holds what a digest is of, in `interactions` and `feedback`."""
_PARENT = "parent_id"
"""Column of `interactions` with the interaction that a prompt goes on from."""
TIME_COLUMNS = {"interactions": "served_at", "feedback": "given_at"}
"""When an event of a table happened."""


def digest(kind: Kind, *, tenant: str, name: str) -> str:
    """What is kept in place of a user's hash or an id: equal for equals, and no way back."""
    return hashlib.sha256(f"{kind}\x1f{tenant}\x1f{name}".encode()).hexdigest()[:32]


class Bar(NamedTuple):
    """Why events of a name are not stored."""

    before_at: datetime
    """Up to when they happened; of an interaction it does not matter."""
    erasure_id: str


class ErasedSet:
    """The digests, as of the last `refresh`, and what was found to belong to them since.

    Not safe to be used from several threads at once.
    """

    def __init__(self, store: DeltaStore) -> None:
        self._store = store
        self._version: int | None = None
        self._bars: dict[Kind, dict[str, Bar]] = {kind: {} for kind in _COLUMNS}
        self._found: list[ErasedRow] = []

    def refresh(self) -> None:
        """Read the table if it changed since the last time.

        Raises:
            ServiceUnavailable: the storage does not answer.
        """
        if not self._store.exists(TABLE):
            return
        version = int(self._store.delta(TABLE).version())
        if version == self._version:
            return
        columns = ["kind", "digest", "before_at", "erasure_id"]
        for row in self._store.dataset(TABLE, version=version).to_table(columns).to_pylist():
            self._add(row["kind"], row["digest"], Bar(row["before_at"], row["erasure_id"]))
        self._version = version

    def without(self, table: str, rows: pa.Table) -> pa.Table:
        """The rows that may be stored; the same table if all may.

        Args:
            table: `interactions`, `feedback` or `dead_letters`. A dead letter that is not JSON says
                nothing of whose it is, and is kept.
            rows: Of that table.
        """
        if not any(self._bars.values()) or not rows.num_rows:
            return rows
        events = list(_events(table, rows))
        if table == "interactions":
            self._note_sessions(events)
            self._note_interactions(events)
        keep = [self._bar_of(event) is None for event in events]
        return rows if all(keep) else rows.filter(pa.array(keep, pa.bool_()))

    def record(self, *, at: datetime) -> None:
        """Store what was noted: feedback on a row that is left out may come to another process.

        Raises:
            ServiceUnavailable: the storage does not answer; the next call stores it.
            StoreConflict: others commit too often; the next call stores it.
        """
        if self._found:
            stamp = {"acted_at": at, "ingest_date": at.date()}
            rows = [row.model_copy(update=stamp) for row in self._found]
            self._store.append(TABLE, to_table(rows))
            self._found.clear()

    def _note_sessions(self, events: Iterable[Mapping[str, Any]]) -> None:
        """With a person go whole sessions, also those of which no row was stored by then."""
        for event in events:
            if event["user"] is None:
                continue
            user = digest("user", tenant=event["tenant"], name=event["user"])
            bar = self._bar("user", user, event["at"])
            if bar is not None:
                self._note("session", event, bar)

    def _note_interactions(self, events: Iterable[Mapping[str, Any]]) -> None:
        """With a row goes what is about it and what goes on from it; parents come first."""
        for event in events:
            bar = self._bar_of(event)
            if bar is not None:
                self._note("interaction", event, bar)

    def _note(self, kind: Kind, event: Mapping[str, Any], bar: Bar) -> None:
        name = digest(kind, tenant=event["tenant"], name=event[_COLUMNS[kind]])
        if self._add(kind, name, bar):
            self._found.append(
                ErasedRow(
                    erasure_id=bar.erasure_id,
                    kind=kind,
                    digest=name,
                    before_at=bar.before_at,
                    acted_at=bar.before_at,
                    ingest_date=bar.before_at.date(),
                )
            )

    def _add(self, kind: Kind, name: str, bar: Bar) -> bool:
        """Whether it says more than what is known."""
        known = self._bars[kind].get(name)
        if known is not None and known.before_at >= bar.before_at:
            return False
        self._bars[kind][name] = bar
        return True

    def _bar_of(self, event: Mapping[str, Any]) -> Bar | None:
        tenant = event.get("tenant")
        if not isinstance(tenant, str):
            return None
        for kind, name in _named(event):
            bar = self._bar(kind, digest(kind, tenant=tenant, name=name), event.get("at"))
            if bar is not None:
                return bar
        return None

    def _bar(self, kind: Kind, name: str, at: datetime | None) -> Bar | None:
        bar = self._bars[kind].get(name)
        if bar is None or kind == "interaction" or at is None or at <= bar.before_at:
            return bar
        return None


def interactions_of(store: DeltaStore, users: Collection[str]) -> frozenset[str]:
    """Digests of all interactions that went with these users, in whatever erasure.

    Args:
        store: Where the tables lie.
        users: Digests of their hashes.
    """
    rows = store.dataset(TABLE).to_table(["erasure_id", "kind", "digest"]).to_pylist()
    erasures = {r["erasure_id"] for r in rows if r["kind"] == "user" and r["digest"] in users}
    return frozenset(
        r["digest"] for r in rows if r["kind"] == "interaction" and r["erasure_id"] in erasures
    )


def _events(table: str, rows: pa.Table) -> Iterator[Mapping[str, Any]]:
    if table == "dead_letters":
        return (_claims(payload) for payload in rows["payload"].to_pylist())
    names = [*_COLUMNS.values(), *([_PARENT] if table == "interactions" else [])]
    renamed = rows.select(["tenant", TIME_COLUMNS[table], *names])
    return iter(renamed.rename_columns(["tenant", "at", *names]).to_pylist())


def _named(event: Mapping[str, Any]) -> Iterator[tuple[Kind, str]]:
    for kind, column in _COLUMNS.items():
        name = event.get(column)
        if isinstance(name, str):
            yield kind, name
    parent = event.get(_PARENT)
    if isinstance(parent, str):
        yield "interaction", parent


def _claims(payload: bytes) -> Mapping[str, Any]:
    """What a broken record says of whose it is; when it happened is not believed."""
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(event, dict):
        return {}
    return {name: event.get(name) for name in ("tenant", *_COLUMNS.values(), _PARENT)}
