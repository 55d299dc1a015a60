"""The tables: Delta Lake under one root, local folder or object store.

Every append is one atomic commit. A commit can carry application transactions: numbers that are
stored with the rows or not at all, which is what makes ingestion exactly once. Reading for people
and trainers is in `views`; this file neither knows Kafka nor interprets rows.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pyarrow as pa
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    Field,
    WriterProperties,
    write_deltalake,
)
from deltalake import Transaction as DeltaTransaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from pyarrow.dataset import Dataset
from pyarrow.fs import FileSystem, LocalFileSystem, SubTreeFileSystem

from onlinerl.errors import ConfigError, ServiceUnavailable, StoreConflict
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.tables.rows import schema_of

_CONFIGURATION = {
    # Readers outside (DuckDB, Spark, Trino) need no support for deletion vectors.
    "delta.enableDeletionVectors": "false",
    # How long a version can be pinned before its log may be cleaned away.
    "delta.logRetentionDuration": "interval 30 days",
    # `maintenance` cleans the log: the library's own way does not know which versions are held.
    "delta.enableExpiredLogCleanup": "false",
}
_APPEND_ATTEMPTS = 20
_ESCAPE = re.compile("%[0-9A-Fa-f]{2}")

_TEXT_COLUMNS = sorted(
    {f.name for row in TABLES.values() for f in schema_of(row) if pa.types.is_string(f.type)}
)

WRITER_PROPERTIES = WriterProperties(
    compression="ZSTD",
    compression_level=3,
    # A group is what a reader decodes at once: about 100 MB of tokens of a usual length.
    max_row_group_size=32_768,
    # Logprobs hardly repeat: a dictionary would store them and a number for each of them.
    default_column_properties=ColumnProperties(dictionary_enabled=False),
    column_properties={name: ColumnProperties(dictionary_enabled=True) for name in _TEXT_COLUMNS},
)
"""How files are written, also by compaction."""


@dataclass(frozen=True, kw_only=True)
class Transaction:
    """A number stored in the same commit as the rows it belongs to.

    The commit succeeds only on top of `expected`, so of two writers that both read `expected`
    exactly one succeeds.
    """

    app_id: str
    version: int
    expected: int | None = None
    """The stored number that this one replaces; None when there is none yet."""


class DeltaStore:
    """All tables under one root.

    Args:
        root: Local folder or object store URI. A folder is taken from the current directory.
        storage_options: Options of the object store.
    """

    def __init__(self, root: str, storage_options: Mapping[str, str] | None = None) -> None:
        if not root:
            raise ConfigError("store.root is empty; give a folder or an object store URI")
        is_uri = "://" in root
        self.root = root.rstrip("/") if is_uri else str(Path(root).expanduser().absolute())
        if not is_uri and _ESCAPE.search(self.root):
            raise ConfigError(
                f"store.root {self.root!r} has a percent sign before two hexadecimal digits, which "
                "the tables take for another character; choose another folder"
            )
        self._options = dict(storage_options or {})

    def create(self) -> None:
        """Create what is missing: tables, and columns that a newer schema added. Idempotent."""
        for name, row_type in TABLES.items():
            schema = schema_of(row_type)
            with storage_errors(f"create table {name}"):
                if not self.exists(name):
                    self._create_table(name, schema)
                self._add_missing_columns(name, schema)
                self._set_missing_properties(name, schema)

    def exists(self, table: str) -> bool:
        """Whether the table was created."""
        return bool(DeltaTable.is_deltatable(self._uri(table), storage_options=self._options))

    def append(
        self, table: str, rows: pa.Table, *, transactions: Sequence[Transaction] = ()
    ) -> int:
        """Add rows and transactions in one commit; either all of it is stored or nothing.

        Columns that the table lacks are added to it; columns that the rows lack are null in them.

        Returns:
            The version of the table that holds them.

        Raises:
            StoreConflict: a stored transaction number is not the expected one; nothing was stored.
            ServiceUnavailable: the storage failed. The commit may or may not have happened: load
                the transaction numbers before doing anything else.
        """
        for _ in range(_APPEND_ATTEMPTS):
            with contextlib.suppress(CommitFailedError):
                return self._append_once(table, rows, transactions)
        raise StoreConflict(
            f"could not append to {table} in {_APPEND_ATTEMPTS} attempts: others commit too often"
        )

    def _append_once(self, table: str, rows: pa.Table, transactions: Sequence[Transaction]) -> int:
        """One attempt on the newest version.

        A deletion that commits in between makes it fail although nothing that is appended is
        concerned. A writer with one of the same app ids does too, which the next look finds out.
        """
        delta = self._load(table)
        for transaction in transactions:
            _check_expected(delta, transaction)
        properties = CommitProperties(
            app_transactions=[DeltaTransaction(t.app_id, t.version) for t in transactions]
        )
        with storage_errors(f"append to table {table}"):
            # Committing on the version that was checked: a writer that slips in between with
            # one of these app ids makes this commit fail.
            write_deltalake(
                delta,
                rows,
                mode="append",
                schema_mode="merge",
                commit_properties=properties,
                writer_properties=WRITER_PROPERTIES,
            )
        return int(delta.version())

    def transaction_version(self, table: str, app_id: str) -> int | None:
        """The number stored for `app_id`, or None."""
        return self.transaction_versions(table, [app_id])[app_id]

    def transaction_versions(self, table: str, app_ids: Iterable[str]) -> dict[str, int | None]:
        """The numbers stored for several ids, read from one version of the table."""
        delta = self._load(table)
        return {app_id: delta.transaction_version(app_id) for app_id in app_ids}

    def versions(self) -> dict[str, int]:
        """The newest version of every table that exists; pass it to `views.connect` to pin."""
        return {name: int(self._load(name).version()) for name in TABLES if self.exists(name)}

    @property
    def storage_options(self) -> dict[str, str]:
        """Options of the object store."""
        return dict(self._options)

    def delta(self, table: str, *, version: int | None = None) -> DeltaTable:
        """The Delta table itself, for upkeep; everything else has a method here.

        Raises:
            ServiceUnavailable: there is no such table or version, or the storage failed.
        """
        return self._load(table, version=version)

    def dataset(
        self, table: str, *, version: int | None = None, ingested_from: date | None = None
    ) -> Dataset:
        """The table, read lazily, at a version or the newest; older days are left out unread."""
        delta = self._load(table, version=version)
        days = None if ingested_from is None else [("ingest_date", ">=", str(ingested_from))]
        with storage_errors(f"read table {table}"):
            return delta.to_pyarrow_dataset(
                file_pruning_predicate=days, filesystem=self._file_system(table)
            )

    def _file_system(self, table: str) -> FileSystem | None:
        """What reads the files of a local table; None leaves an object store to delta-rs.

        pyarrow begins a scan with the interpreter locked, and the threads that read through Python,
        as delta-rs lets them, wait for that lock: now and then both wait for ever.
        """
        if "://" in self.root:
            return None
        return SubTreeFileSystem(self._uri(table), LocalFileSystem())

    def _create_table(self, name: str, schema: pa.Schema) -> None:
        try:
            DeltaTable.create(
                self._uri(name),
                schema=schema,
                mode="ignore",
                partition_by=["ingest_date"],
                configuration=_configuration(schema),
                storage_options=self._options,
            )
        except DeltaError:
            # Two processes start at once: one of them creates the table.
            if not self.exists(name):
                raise

    def _add_missing_columns(self, name: str, schema: pa.Schema) -> None:
        delta = self._load(name)
        present = {field.name for field in delta.schema().fields}
        missing = [field for field in schema if field.name not in present]
        if missing:
            # Old files have no value for them, so they are nullable whatever the model says.
            delta.alter.add_columns([Field.from_arrow(f.with_nullable(True)) for f in missing])

    def _set_missing_properties(self, name: str, schema: pa.Schema) -> None:
        delta = self._load(name)
        present = delta.metadata().configuration
        missing = {k: v for k, v in _configuration(schema).items() if k not in present}
        if missing:
            # Two processes that start at once say the same; the second one finds nothing to do.
            with contextlib.suppress(CommitFailedError):
                delta.alter.set_table_properties(missing)

    def _load(self, table: str, *, version: int | None = None) -> DeltaTable:
        with storage_errors(f"open table {table}"):
            try:
                return DeltaTable(self._uri(table), version=version, storage_options=self._options)
            except TableNotFoundError as error:
                raise ServiceUnavailable(
                    f"there is no table {table} under {self.root}; ingest creates it at its start"
                ) from error

    def _uri(self, table: str) -> str:
        return f"{self.root}/{table}"


def _configuration(schema: pa.Schema) -> dict[str, str]:
    """Properties of a table; its log keeps statistics of numbers, times and dates alone.

    Least and greatest values of text would write ids of people and interactions into the log,
    which outlives the rows.
    """
    counted = [field.name for field in schema if _is_harmless(field.type)]
    return {**_CONFIGURATION, "delta.dataSkippingStatsColumns": ",".join(counted)}


def _is_harmless(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_timestamp(kind) or pa.types.is_boolean(kind)
    )


def _check_expected(delta: DeltaTable, transaction: Transaction) -> None:
    stored = delta.transaction_version(transaction.app_id)
    if stored != transaction.expected:
        raise StoreConflict(
            f"{transaction.app_id} is stored as {stored}, not {transaction.expected}: "
            "another writer was here"
        )


@contextlib.contextmanager
def storage_errors(attempt: str) -> Iterator[None]:
    """What storage raises, as an error a caller can wait for; conflicts pass through."""
    try:
        yield
    except (CommitFailedError, ServiceUnavailable):
        raise
    except (DeltaError, OSError) as error:
        raise ServiceUnavailable(f"cannot {attempt}: {error}") from error
