"""Keeps erased events from being stored again, by their digests in the table `erased`.

A broker may still hold events of an erased person, and a gateway sends its recent events again to a
broker that lost its data. So ingest checks every batch against these digests before storing it.
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
"""The column of `interactions` and `feedback` with the id that a digest is made from."""
_PARENT = "parent_id"
"""The column of `interactions` with the interaction that the prompt extends."""
TIME_COLUMNS = {"interactions": "served_at", "feedback": "given_at"}
"""The column with the time of an event, by table."""


def digest(kind: Kind, *, tenant: str, name: str) -> str:
    """Replaces a user's hash or an id: equal ids give equal digests, which do not give the id."""
    return hashlib.sha256(f"{kind}\x1f{tenant}\x1f{name}".encode()).hexdigest()[:32]


class Exclusion(NamedTuple):
    """Keeps the events of one user, session or interaction from being stored."""

    before_at: datetime
    """Excludes events up to this time; all events of an interaction are excluded."""
    erasure_id: str


class ErasedSet:
    """The exclusions as of the last `refresh`, and those that were derived from rows since then.

    Not thread-safe. Use it for one sequence of batches: call `refresh`, then `without` on each
    table of rows, then `record`.

    Args:
        store: Where the tables lie.
    """

    def __init__(self, store: DeltaStore) -> None:
        self._store = store
        self._version: int | None = None
        self._exclusions: dict[Kind, dict[str, Exclusion]] = {kind: {} for kind in _COLUMNS}
        self._derived: list[ErasedRow] = []

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
            self._add(row["kind"], row["digest"], Exclusion(row["before_at"], row["erasure_id"]))
        self._version = version

    def without(self, table: str, rows: pa.Table) -> pa.Table:
        """The rows that may be stored; the same table if all of them may.

        Args:
            table: `interactions`, `feedback` or `dead_letters`. A dead letter that is not JSON is
                kept, because nothing tells whose it is.
            rows: Rows of that table.
        """
        if not any(self._exclusions.values()) or not rows.num_rows:
            return rows
        events = list(_events(table, rows))
        if table == "interactions":
            self._exclude_sessions(events)
            self._exclude_interactions(events)
        keep = [self._exclusion_of(event) is None for event in events]
        return rows if all(keep) else rows.filter(pa.array(keep, pa.bool_()))

    def record(self, *, at: datetime) -> None:
        """Store the derived exclusions, because another process may get feedback on such a row.

        Raises:
            ServiceUnavailable: the storage does not answer; the next call stores it.
            StoreConflict: others commit too often; the next call stores it.
        """
        if self._derived:
            stamp = {"acted_at": at, "ingest_date": at.date()}
            rows = [row.model_copy(update=stamp) for row in self._derived]
            self._store.append(TABLE, to_table(rows))
            self._derived.clear()

    def _exclude_sessions(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Exclude every session of an erased person, even one of which no row was stored yet."""
        for event in events:
            if event["user"] is None:
                continue
            user = digest("user", tenant=event["tenant"], name=event["user"])
            exclusion = self._exclusion("user", user, event["at"])
            if exclusion is not None:
                self._exclude("session", event, exclusion)

    def _exclude_interactions(self, events: Collection[Mapping[str, Any]]) -> None:
        """Exclude every interaction that is excluded by its ids or that extends an excluded one.

        A batch may have a child before its parent, so it is read until nothing is added.
        """
        num_before = -1
        while len(self._derived) > num_before:
            num_before = len(self._derived)
            for event in events:
                exclusion = self._exclusion_of(event)
                if exclusion is not None:
                    self._exclude("interaction", event, exclusion)

    def _exclude(self, kind: Kind, event: Mapping[str, Any], exclusion: Exclusion) -> None:
        name = digest(kind, tenant=event["tenant"], name=event[_COLUMNS[kind]])
        if self._add(kind, name, exclusion):
            self._derived.append(
                ErasedRow(
                    erasure_id=exclusion.erasure_id,
                    kind=kind,
                    digest=name,
                    before_at=exclusion.before_at,
                    acted_at=exclusion.before_at,
                    ingest_date=exclusion.before_at.date(),
                )
            )

    def _add(self, kind: Kind, name: str, exclusion: Exclusion) -> bool:
        """Add an exclusion; False when a known one already covers it."""
        known = self._exclusions[kind].get(name)
        if known is not None and known.before_at >= exclusion.before_at:
            return False
        self._exclusions[kind][name] = exclusion
        return True

    def _exclusion_of(self, event: Mapping[str, Any]) -> Exclusion | None:
        tenant = event.get("tenant")
        if not isinstance(tenant, str):
            return None
        for kind, name in _ids_in(event):
            exclusion = self._exclusion(
                kind, digest(kind, tenant=tenant, name=name), event.get("at")
            )
            if exclusion is not None:
                return exclusion
        return None

    def _exclusion(self, kind: Kind, name: str, at: datetime | None) -> Exclusion | None:
        exclusion = self._exclusions[kind].get(name)
        if exclusion is None or kind == "interaction" or at is None or at <= exclusion.before_at:
            return exclusion
        return None


def interactions_of(store: DeltaStore, users: Collection[str]) -> frozenset[str]:
    """Digests of all interactions that any erasure of these users covered.

    Args:
        store: Where the tables lie.
        users: Digests of the users' hashes.
    """
    rows = store.dataset(TABLE).to_table(["erasure_id", "kind", "digest"]).to_pylist()
    erasures = {r["erasure_id"] for r in rows if r["kind"] == "user" and r["digest"] in users}
    return frozenset(
        r["digest"] for r in rows if r["kind"] == "interaction" and r["erasure_id"] in erasures
    )


def _events(table: str, rows: pa.Table) -> Iterator[Mapping[str, Any]]:
    if table == "dead_letters":
        return (_claimed_ids(payload) for payload in rows["payload"].to_pylist())
    names = [*_COLUMNS.values(), *([_PARENT] if table == "interactions" else [])]
    renamed = rows.select(["tenant", TIME_COLUMNS[table], *names])
    return iter(renamed.rename_columns(["tenant", "at", *names]).to_pylist())


def _ids_in(event: Mapping[str, Any]) -> Iterator[tuple[Kind, str]]:
    for kind, column in _COLUMNS.items():
        name = event.get(column)
        if isinstance(name, str):
            yield kind, name
    parent = event.get(_PARENT)
    if isinstance(parent, str):
        yield "interaction", parent


def _claimed_ids(payload: bytes) -> Mapping[str, Any]:
    """The ids that a broken record claims. Its time is left out, because it cannot be trusted."""
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(event, dict):
        return {}
    return {name: event.get(name) for name in ("tenant", *_COLUMNS.values(), _PARENT)}
