"""All files below a table's folder, on a local disk or in an object store.

This includes files that no version of the table refers to.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.tables.delta_store import DeltaStore

LOG_FOLDER = "_delta_log"
_UNFINISHED = re.compile(r"(#\d+|\.tmp)$")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a table."""

    path: str
    """Path relative to the table's folder."""
    modified_at: datetime
    num_bytes: int

    @property
    def is_log(self) -> bool:
        """Whether the file belongs to the log of commits instead of holding rows."""
        return PurePosixPath(self.path).parts[0] == LOG_FOLDER

    @property
    def is_parquet(self) -> bool:
        """Whether the file is a Parquet file."""
        return self.path.endswith(".parquet")

    @property
    def is_unfinished(self) -> bool:
        """Whether the file still has its temporary name, because its writer is at work or died."""
        return _UNFINISHED.search(self.path) is not None


class TableFiles:
    """Lists, opens and removes files of one table.

    Args:
        store: Where the tables lie.
        table: Name of the table.

    Raises:
        ServiceUnavailable: from every method, when the storage failed.
    """

    def __init__(self, store: DeltaStore, table: str) -> None:
        self._uri = f"{store.root}/{table}"
        if is_remote(store.root):
            handler = DeltaStorageHandler(self._uri, store.storage_options)
            self._files: fs.FileSystem = fs.PyFileSystem(handler)
        else:
            # The library's own listing of a folder leaves out unfinished files.
            self._files = fs.SubTreeFileSystem(_folder_of(self._uri), fs.LocalFileSystem())

    def all(self) -> list[StoredFile]:
        """Every file, including the log and unfinished files."""
        everything = fs.FileSelector("", recursive=True, allow_not_found=True)
        try:
            entries = self._files.get_file_info(everything)
        except OSError as error:
            raise ServiceUnavailable(f"cannot list {self._uri}: {error}") from error
        return [
            StoredFile(
                path=entry.path.lstrip("/"),
                modified_at=entry.mtime.astimezone(UTC),
                num_bytes=entry.size,
            )
            for entry in entries
            if entry.type == fs.FileType.File
        ]

    def read(self, file: StoredFile) -> bytes:
        """The content of the file.

        Raises:
            FileNotFoundError: the file is gone.
        """
        with self._open(file) as opened:
            content: bytes = opened.read()
        return content

    def open(self, file: StoredFile) -> pa.NativeFile:
        """Open the file for reading at any position.

        Raises:
            FileNotFoundError: the file is gone.
        """
        return self._open(file)

    def remove(self, file: StoredFile) -> None:
        """Remove the file, unless it is already gone."""
        try:
            self._files.delete_file(file.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ServiceUnavailable(f"cannot remove {self._uri}/{file.path}: {error}") from error

    def _open(self, file: StoredFile) -> pa.NativeFile:
        try:
            return self._files.open_input_file(file.path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ServiceUnavailable(f"cannot read {self._uri}/{file.path}: {error}") from error


def referenced(store: DeltaStore, table: str, *, version: int | None = None) -> set[str]:
    """Paths, relative to the table's folder, of the data files of one version."""
    actions = store.delta(table, version=version).get_add_actions(flatten=True)
    return {unquote(str(path)) for path in pa.table(actions)["path"].to_pylist()}


def log_versions(files: list[StoredFile]) -> Iterator[tuple[int, StoredFile]]:
    """The files of the log with their version: commits, checkpoints and checksums."""
    for file in files:
        number = PurePosixPath(file.path).name.partition(".")[0]
        if file.is_log and number.isdigit():
            yield int(number), file


def is_remote(root: str) -> bool:
    """Whether the root is an object store."""
    return urlsplit(root).scheme not in ("", "file")


def _folder_of(uri: str) -> str:
    return unquote(urlsplit(uri).path) if uri.startswith("file://") else uri
