"""What an erasure has to remember until it is done, in a file of its own, for its owner only.

Rows go one table after the other, and with the interactions goes the knowledge of which they were.
A process that dies in between leaves this file; the next one goes on from it. It is removed when
the proof is there.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict

from onlinerl.rollout_store.erasure.erased import digest
from onlinerl.rollout_store.erasure.scope import Scope, TenantScope


class TenantState(BaseModel):
    """A `TenantScope` as text."""

    model_config = ConfigDict(frozen=True)

    user: str
    sessions: tuple[str, ...] = ()
    interactions: tuple[str, ...] = ()


class ErasureState(BaseModel):
    """How far an erasure came."""

    model_config = ConfigDict(frozen=True)

    erasure_id: str
    started_at: AwareDatetime
    tenants: dict[str, TenantState]
    num_rows: dict[str, int] = {}
    """Deleted by table, over all attempts."""
    num_files: int = 0
    """Data files removed, over all attempts."""
    marked: tuple[str, ...] = ()
    """Snapshots that held rows."""

    @property
    def scope(self) -> dict[str, TenantScope]:
        """What is erased."""
        return {
            tenant: TenantScope(
                user=state.user,
                sessions=frozenset(state.sessions),
                interactions=frozenset(state.interactions),
            )
            for tenant, state in self.tenants.items()
        }

    def with_scope(self, scope: Scope) -> "ErasureState":
        """The same erasure of this."""
        tenants = {
            tenant: TenantState(
                user=part.user,
                sessions=tuple(sorted(part.sessions)),
                interactions=tuple(sorted(part.interactions)),
            )
            for tenant, part in scope.items()
        }
        return self.model_copy(update={"tenants": tenants})


class StateFile:
    """One file per person and choice of tenants below `folder`; named by a digest."""

    def __init__(self, folder: Path, *, users: Sequence[tuple[str, str]]) -> None:
        tenants = "\x1f".join(f"{tenant}\x1f{user}" for tenant, user in sorted(users))
        self._path = folder / f"{digest('user', tenant='', name=tenants)}.json"

    def load(self) -> ErasureState | None:
        """What an earlier attempt left."""
        try:
            return ErasureState.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None

    def save(self, state: ErasureState) -> None:
        """Replace the file at once: whole or not at all, and on the disk before this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            file.write(state.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def remove(self) -> None:
        """The erasure is done."""
        self._path.unlink(missing_ok=True)
