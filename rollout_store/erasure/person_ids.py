"""The ids of everything that belongs to a person, by tenant.

A prompt repeats what was said before it, whoever sends it. So an erasure takes all rows of the
sessions in which the person took part, and every interaction whose prompt extends one of these
rows, in any session. The search reads every data file under the root, including files that no
version of a table refers to any more.
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
class PersonIds:
    """The ids to erase within one tenant."""

    user: str
    """Keyed hash of the person, as it was logged."""
    sessions: frozenset[str] = field(default_factory=frozenset)
    interactions: frozenset[str] = field(default_factory=frozenset)

    def with_rows(self, rows: pa.Table) -> "PersonIds":
        """Add the interactions of these rows, and the sessions of rows that are the person's."""
        own = rows.filter(pc.fill_null(pc.equal(rows["user"], self.user), False))
        return replace(
            self,
            sessions=self.sessions | set(own["session_id"].to_pylist()),
            interactions=self.interactions | set(rows["interaction_id"].to_pylist()),
        )

    def matches(self, rows: pa.Table) -> pa.Array:
        """Per row with the columns of `_LINKS`: whether it is in the ids or extends one of them."""
        return pc.or_(
            pc.or_(
                pc.fill_null(pc.equal(rows["user"], self.user), False),
                pc.is_in(rows["session_id"], _strings(self.sessions)),
            ),
            pc.is_in(rows["parent_id"], _strings(self.interactions)),
        )


IdsByTenant = Mapping[str, PersonIds]
"""The ids of one person, by tenant."""


def find_ids(
    store: DeltaStore, ids: IdsByTenant, *, on_file: Callable[[], None] = lambda: None
) -> dict[str, PersonIds]:
    """The ids, extended by all sessions and interactions that belong to them.

    Args:
        store: Where the tables lie.
        ids: The hash of the person by tenant, and the ids that are already known.
        on_file: Called after every file that was read.
    """
    extended = dict(ids)
    while True:
        before = dict(extended)
        for rows in _links(store, on_file):
            for tenant, part in extended.items():
                of_tenant = rows.filter(pc.equal(rows["tenant"], tenant))
                extended[tenant] = part.with_rows(of_tenant.filter(part.matches(of_tenant)))
        if extended == before:
            return extended


def known_tenants(store: DeltaStore) -> set[str]:
    """Every tenant of which any file has a row."""
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
            continue  # damaged: `scan` decides what happens to it
        # Rewritten files hold string views, which few compute functions accept.
        yield rows.cast(pa.schema([(name, pa.string()) for name in columns]))


def data_files(files: TableFiles) -> list[StoredFile]:
    """The Parquet files of a table that hold rows, whether a version refers to them or not."""
    return [file for file in files.all() if file.is_parquet and not file.is_log]


def _strings(names: frozenset[str]) -> pa.Array:
    return pa.array(sorted(names), pa.string())
