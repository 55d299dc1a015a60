"""What was erased and must not come back, kept as digests in the table `erased`.

A broker may still hold an event of an erased person, and the gateway ships its tail again to a
broker that came back empty. Ingest asks here before it stores anything.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa

from onlinerl.rollout_store.store import DeltaStore

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


class ErasedSet:
    """The digests, as of the last `refresh`.

    Not safe to be used from several threads at once.
    """

    def __init__(self, store: DeltaStore) -> None:
        self._store = store
        self._version: int | None = None
        self._before: dict[Kind, dict[str, datetime]] = {kind: {} for kind in _COLUMNS}

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
        columns = ["kind", "digest", "before_at"]
        for row in self._store.dataset(TABLE, version=version).to_table(columns).to_pylist():
            known = self._before[row["kind"]]
            earlier = known.get(row["digest"], row["before_at"])
            known[row["digest"]] = max(earlier, row["before_at"])
        self._version = version

    def without(self, table: str, rows: pa.Table) -> pa.Table:
        """The rows that may be stored; the same table if all may.

        Args:
            table: `interactions`, `feedback` or `dead_letters`. A dead letter that is not JSON says
                nothing of whose it is, and is kept.
            rows: Of that table.
        """
        if not any(self._before.values()) or not rows.num_rows:
            return rows
        events = list(_events(table, rows))
        if table == "interactions":
            self._note_sessions(events)
            self._note_descendants(events)
        keep = [not self._holds(event) for event in events]
        return rows if all(keep) else rows.filter(pa.array(keep, pa.bool_()))

    def _note_sessions(self, events: Iterable[Mapping[str, Any]]) -> None:
        """With a person go whole sessions, also those that no row was stored of when it was done.

        What is noted here is forgotten with the process.
        """
        for event in events:
            if event["user"] is None:
                continue
            user = digest("user", tenant=event["tenant"], name=event["user"])
            if self._is_erased("user", user, event["at"]):
                session = digest("session", tenant=event["tenant"], name=event["session_id"])
                known = self._before["session"]
                known[session] = max(known.get(session, event["at"]), self._before["user"][user])

    def _note_descendants(self, events: Iterable[Mapping[str, Any]]) -> None:
        """What goes on from a row that is left out is left out; parents come first.

        What is noted here is forgotten with the process.
        """
        known = self._before["interaction"]
        for event in events:
            if isinstance(event[_PARENT], str):
                parent = digest("interaction", tenant=event["tenant"], name=event[_PARENT])
                if parent in known:
                    own = digest(
                        "interaction", tenant=event["tenant"], name=event["interaction_id"]
                    )
                    known.setdefault(own, known[parent])

    def _holds(self, event: Mapping[str, Any]) -> bool:
        tenant = event.get("tenant")
        return isinstance(tenant, str) and any(
            self._is_erased(kind, digest(kind, tenant=tenant, name=name), event.get("at"))
            for kind, name in _named(event)
        )

    def _is_erased(self, kind: Kind, name: str, at: datetime | None) -> bool:
        before = self._before[kind].get(name)
        if before is None:
            return False
        return kind == "interaction" or at is None or at <= before


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
