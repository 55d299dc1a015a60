"""What an erasure must remember until it is done: a file that only its owner can read.

Rows are deleted table by table, and once the interactions are deleted, nothing in the tables tells
which rows belonged to the person. If a process dies, the next one reads this file and continues.
The file is removed when the proof is complete.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict

from onlinerl.process.files import replace_file
from onlinerl.rollout_store.erasure.erased import digest
from onlinerl.rollout_store.erasure.person_ids import IdsByTenant, PersonIds


class TenantState(BaseModel):
    """The JSON form of `PersonIds`."""

    model_config = ConfigDict(frozen=True)

    user: str
    sessions: tuple[str, ...] = ()
    interactions: tuple[str, ...] = ()


class ErasureState(BaseModel):
    """The progress of an erasure."""

    model_config = ConfigDict(frozen=True)

    erasure_id: str
    started_at: AwareDatetime
    tenants: dict[str, TenantState]
    num_rows: dict[str, int] = {}
    """Deleted rows by table, over all attempts."""
    num_files: int = 0
    """Data files removed, over all attempts."""
    marked: tuple[str, ...] = ()
    """Names of the marked snapshots."""

    @property
    def ids(self) -> dict[str, PersonIds]:
        """The ids to erase, by tenant."""
        return {
            tenant: PersonIds(
                user=state.user,
                sessions=frozenset(state.sessions),
                interactions=frozenset(state.interactions),
            )
            for tenant, state in self.tenants.items()
        }

    def with_ids(self, ids: IdsByTenant) -> "ErasureState":
        """The same erasure with other ids."""
        tenants = {
            tenant: TenantState(
                user=part.user,
                sessions=tuple(sorted(part.sessions)),
                interactions=tuple(sorted(part.interactions)),
            )
            for tenant, part in ids.items()
        }
        return self.model_copy(update={"tenants": tenants})


class StateFile:
    """The state file of one person in a set of tenants; its name is a digest.

    Args:
        folder: Folder of all state files; `save` creates it.
        users: Pairs of tenant and user hash.
    """

    def __init__(self, folder: Path, *, users: Sequence[tuple[str, str]]) -> None:
        tenants = "\x1f".join(f"{tenant}\x1f{user}" for tenant, user in sorted(users))
        self._path = folder / f"{digest('user', tenant='', name=tenants)}.json"

    def load(self) -> ErasureState | None:
        """The state that an earlier attempt saved, or None."""
        try:
            return ErasureState.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None

    def save(self, state: ErasureState) -> None:
        """Replace the file atomically; the state is on the disk when this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, state.model_dump_json(), private=True)

    def remove(self) -> None:
        """Remove the file, because the erasure is complete."""
        self._path.unlink(missing_ok=True)
