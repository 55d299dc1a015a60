"""What belongs to a person: their rows, the sessions these are in, and what was built on them.

A prompt repeats what was said before, by tokens or by reference, whoever asks. So with a person go
all rows of the sessions they took part in, and every interaction whose prompt extends one of them,
in whatever session. The walk reads every data file under the root, also those that no version of
the table refers to any more.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.files import StoredFile, TableFiles

_LINKS = ["tenant", "user", "session_id", "interaction_id", "parent_id"]


@dataclass(frozen=True, kw_only=True)
class TenantScope:
    """What is erased within one tenant."""

    user: str
    """Keyed hash of the person, as it was logged."""
    sessions: frozenset[str] = field(default_factory=frozenset)
    interactions: frozenset[str] = field(default_factory=frozenset)

    def with_rows(self, rows: pa.Table) -> "TenantScope":
        """Also these interactions; those of the person bring their sessions."""
        own = rows.filter(pc.fill_null(pc.equal(rows["user"], self.user), False))
        return replace(
            self,
            sessions=self.sessions | set(own["session_id"].to_pylist()),
            interactions=self.interactions | set(rows["interaction_id"].to_pylist()),
        )

    def touches(self, rows: pa.Table) -> pa.Array:
        """Per row with the columns of `_LINKS`: whether it is theirs or built on theirs."""
        return pc.or_(
            pc.or_(
                pc.fill_null(pc.equal(rows["user"], self.user), False),
                pc.is_in(rows["session_id"], _values(self.sessions)),
            ),
            pc.is_in(rows["parent_id"], _values(self.interactions)),
        )


Scope = Mapping[str, TenantScope]
"""By tenant."""


def find_scope(
    store: DeltaStore, scope: Scope, *, on_file: Callable[[], None] = lambda: None
) -> dict[str, TenantScope]:
    """The scope with all sessions and interactions that belong to it.

    Args:
        store: Where the tables lie.
        scope: The hash of the person by tenant, and what is known of it already.
        on_file: Told of every file that was read.
    """
    found = dict(scope)
    while True:
        before = dict(found)
        for rows in _links(store, on_file):
            for tenant, part in found.items():
                mine = rows.filter(pc.equal(rows["tenant"], tenant))
                found[tenant] = part.with_rows(mine.filter(part.touches(mine)))
        if found == before:
            return found


def known_tenants(store: DeltaStore) -> set[str]:
    """Every tenant that any file has a row of."""
    tenants: set[str] = set()
    for table in ("interactions", "feedback"):
        for rows in _columns(store, table, ["tenant"]):
            tenants.update(pc.unique(rows["tenant"]).to_pylist())
    return tenants


def _links(store: DeltaStore, on_file: Callable[[], None]) -> Iterator[pa.Table]:
    for rows in _columns(store, "interactions", _LINKS):
        on_file()
        yield rows


def _columns(store: DeltaStore, table: str, columns: list[str]) -> Iterator[pa.Table]:
    if not store.exists(table):
        return
    files = TableFiles(store, table)
    for file in data_files(files):
        try:
            with files.open(file) as opened:
                rows = parquet.ParquetFile(opened).read(columns=columns).select(columns)
        except FileNotFoundError:
            continue  # vacuumed since it was listed
        except pa.ArrowInvalid:
            continue  # damaged: `scan` says what becomes of it
        # Files that were rewritten hold string views, which few functions know.
        yield rows.cast(pa.schema([(name, pa.string()) for name in columns]))


def data_files(files: TableFiles) -> list[StoredFile]:
    """The Parquet files of a table that hold rows, referred to or not."""
    return [file for file in files.all() if file.is_parquet and not file.is_log]


def _values(names: frozenset[str]) -> pa.Array:
    return pa.array(sorted(names), pa.string())
