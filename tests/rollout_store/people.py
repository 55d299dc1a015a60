"""A store with several people in it, with ids of the form that the gateway makes."""

import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel

from onlinerl.rollout_store.schema import DeadLetterRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table
from onlinerl.rollout_store.user_hash import UserHasher
from tests.events import NOON, feedback, feedback_row, interaction, interaction_rows

HASHER = UserHasher("pepper")


def hash_of(user: str, *, tenant: str = "acme") -> str:
    hashed = HASHER.hash(user, tenant=tenant)
    assert hashed is not None
    return hashed


def some_id(name: str) -> str:
    """The same UUID for the same name."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, name))


class People:
    """Appends events as ingest would, each batch one commit, offsets counting up."""

    def __init__(self, folder: Path) -> None:
        self.store = DeltaStore(str(folder / "store"))
        self.store.create()
        self._offset = 0
        self.stored_at = NOON

    def says(
        self, name: str, *, user: str | None, session: str, at: datetime = NOON, **changes: object
    ) -> str:
        """One interaction; returns its id."""
        tenant = str(changes.get("tenant", "acme"))
        event = interaction(
            some_id(name),
            session_id=session,
            user=None if user is None else hash_of(user, tenant=tenant),
            served_at=at,
            **changes,
        )
        self._append("interactions", interaction_rows(event, **self._origin()))
        return event.interaction_id

    def judges(self, name: str, *, user: str | None = None, **changes: object) -> str:
        """One feedback; returns its id."""
        hashed = None if user is None else hash_of(user)
        event = feedback(name, user=hashed, **changes)
        self._append("feedback", [feedback_row(event, **self._origin())])
        return event.feedback_id

    def breaks(self, payload: bytes, *, key: bytes | None = None) -> None:
        """One dead letter."""
        fields = {
            "topic": "onlinerl.interactions",
            "partition": 0,
            "reason": "it is broken",
            "key": key,
            "payload": payload,
        }
        letter = DeadLetterRow.model_validate(fields | self._origin())
        self._append("dead_letters", [letter])

    def column(self, table: str, name: str) -> list[object]:
        """Values of the newest version."""
        values: list[object] = self.store.dataset(table).to_table([name])[name].to_pylist()
        return sorted(values, key=str)

    def _origin(self) -> dict[str, object]:
        self._offset += 1
        at = self.stored_at
        return {"offset": self._offset, "ingested_at": at, "ingest_date": at.date()}

    def _append(self, table: str, rows: Sequence[BaseModel]) -> None:
        self.store.append(table, to_table(rows))
