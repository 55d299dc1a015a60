"""The tables: Delta Lake under one root, in a local folder or an object store.

Every append is one atomic commit. A commit can carry application transactions: numbers that are
stored together with the rows or not at all. Ingest uses them to store every record exactly once.
People and trainers read through `views`. This file knows nothing about Kafka or the meaning of
rows.
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
    # Without deletion vectors, readers such as DuckDB, Spark and Trino need no support for them.
    "delta.enableDeletionVectors": "false",
    # For how long a version can be pinned before its log may be removed.
    "delta.logRetentionDuration": "interval 30 days",
    # `onlinerl maintain` cleans the log, because the library does not know which versions are held.
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
    # A reader decodes one group at a time: about 100 MB for interactions of usual length.
    max_row_group_size=32_768,
    # Logprobs hardly repeat, so a dictionary would only add a number for each of them.
    default_column_properties=ColumnProperties(dictionary_enabled=False),
    column_properties={name: ColumnProperties(dictionary_enabled=True) for name in _TEXT_COLUMNS},
)
"""How every data file is written, including those of compaction."""


@dataclass(frozen=True, kw_only=True)
class Transaction:
    """A number that is stored in the same commit as its rows.

    The commit succeeds only if the stored number is `expected`. So if two writers read the same
    number, exactly one of them succeeds.
    """

    app_id: str
    version: int
    expected: int | None = None
    """The stored number that this one replaces; None if no number is stored yet."""


class DeltaStore:
    """All tables under one root.

    Args:
        root: Local folder or object store URI. A relative folder starts at the current directory.
        storage_options: Options of the object store.

    Raises:
        ConfigError: the root is empty, or a folder that the library would misread.
    """

    def __init__(self, root: str, storage_options: Mapping[str, str] | None = None) -> None:
        if not root:
            raise ConfigError("store.root is empty; give a folder or an object store URI")
        is_uri = "://" in root
        self.root = root.rstrip("/") if is_uri else str(Path(root).expanduser().absolute())
        if not is_uri and _ESCAPE.search(self.root):
            raise ConfigError(
                f"store.root {self.root!r} has a percent sign before two hexadecimal digits, which "
                "would be read as an escaped character; choose another folder"
            )
        self._options = dict(storage_options or {})

    def create(self) -> None:
        """Create missing tables, and add columns of a newer schema; safe to repeat."""
        for name, row_type in TABLES.items():
            schema = schema_of(row_type)
            with storage_errors(f"create table {name}"):
                if not self.exists(name):
                    self._create_table(name, schema)
                self._add_missing_columns(name, schema)
                self._set_missing_properties(name, schema)

    def exists(self, table: str) -> bool:
        """Whether the table exists."""
        return bool(DeltaTable.is_deltatable(self._uri(table), storage_options=self._options))

    def append(
        self, table: str, rows: pa.Table, *, transactions: Sequence[Transaction] = ()
    ) -> int:
        """Add rows and transactions in one commit, which stores all of them or nothing.

        Columns that the table lacks are added to it; columns that the rows lack become null.

        Args:
            table: Name of the table.
            rows: The rows to add; may be empty.
            transactions: Numbers to store with the rows.

        Returns:
            The version of the table that contains the rows.

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
        """Make one attempt on the newest version.

        A deletion that commits meanwhile makes the attempt fail, although it does not touch the
        appended rows. A writer with one of the same app ids does too; the next attempt finds that.
        """
        delta = self._load(table)
        for transaction in transactions:
            _check_expected(delta, transaction)
        properties = CommitProperties(
            app_transactions=[DeltaTransaction(t.app_id, t.version) for t in transactions]
        )
        with storage_errors(f"append to table {table}"):
            # The commit is based on the version that was checked, so it fails if another writer
            # has committed one of these app ids since.
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
        """The number that is stored for `app_id`, or None."""
        return self.transaction_versions(table, [app_id])[app_id]

    def transaction_versions(self, table: str, app_ids: Iterable[str]) -> dict[str, int | None]:
        """The numbers that are stored for these ids in one version of the table, or None."""
        delta = self._load(table)
        return {app_id: delta.transaction_version(app_id) for app_id in app_ids}

    def versions(self) -> dict[str, int]:
        """The newest version of every existing table, e.g. to pin `views.connect` to them."""
        return {name: int(self._load(name).version()) for name in TABLES if self.exists(name)}

    @property
    def storage_options(self) -> dict[str, str]:
        """Options of the object store."""
        return dict(self._options)

    def delta(self, table: str, *, version: int | None = None) -> DeltaTable:
        """The Delta table itself, at a version or the newest; only for upkeep and erasure.

        Raises:
            ServiceUnavailable: there is no such table or version, or the storage failed.
        """
        return self._load(table, version=version)

    def dataset(
        self, table: str, *, version: int | None = None, ingested_from: date | None = None
    ) -> Dataset:
        """The table as a lazy dataset.

        Args:
            table: Name of the table.
            version: Version to read; the newest when absent.
            ingested_from: Skip the files of earlier days without reading them.

        Raises:
            ServiceUnavailable: there is no such table or version, or the storage failed.
        """
        delta = self._load(table, version=version)
        days = None if ingested_from is None else [("ingest_date", ">=", str(ingested_from))]
        with storage_errors(f"read table {table}"):
            return delta.to_pyarrow_dataset(
                file_pruning_predicate=days, filesystem=self._file_system(table)
            )

    def _file_system(self, table: str) -> FileSystem | None:
        """The file system that reads a local table; None leaves an object store to delta-rs.

        delta-rs reads through Python, whose threads wait for the interpreter lock. pyarrow starts a
        scan while it holds that lock, so that now and then both wait forever.
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
            # Of two processes that start at the same time, only one creates the table.
            if not self.exists(name):
                raise

    def _add_missing_columns(self, name: str, schema: pa.Schema) -> None:
        delta = self._load(name)
        present = {field.name for field in delta.schema().fields}
        missing = [field for field in schema if field.name not in present]
        if missing:
            # Old files have no value for these columns, so they are nullable in the table.
            delta.alter.add_columns([Field.from_arrow(f.with_nullable(True)) for f in missing])

    def _set_missing_properties(self, name: str, schema: pa.Schema) -> None:
        delta = self._load(name)
        present = delta.metadata().configuration
        missing = {k: v for k, v in _configuration(schema).items() if k not in present}
        if missing:
            # Two processes that start at the same time set the same properties.
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
    """Properties of a table; its log keeps statistics only of numbers, times and booleans.

    Statistics of text are its least and greatest values. They would write ids of people and
    interactions into the log, which outlives the rows.
    """
    counted = [field.name for field in schema if _has_statistics(field.type)]
    return {**_CONFIGURATION, "delta.dataSkippingStatsColumns": ",".join(counted)}


def _has_statistics(kind: pa.DataType) -> bool:
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
    """Raise errors of the storage as `ServiceUnavailable`, which callers retry.

    Commit conflicts pass through.

    Args:
        attempt: What the block does, to complete the sentence "cannot ...".
    """
    try:
        yield
    except (CommitFailedError, ServiceUnavailable):
        raise
    except (DeltaError, OSError) as error:
        raise ServiceUnavailable(f"cannot {attempt}: {error}") from error
