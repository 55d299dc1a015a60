"""The log of a table: writing checkpoints, and removing what no readable version needs."""

from datetime import datetime

from onlinerl.errors import ServiceUnavailable
from onlinerl.rollout_store.tables.delta_store import DeltaStore, storage_errors
from onlinerl.rollout_store.tables.files import StoredFile, TableFiles, log_versions, referenced


def files_of_version(
    store: DeltaStore, table: str, *, version: int, files: list[StoredFile]
) -> set[str] | None:
    """Paths of the data files of a version; None when it can never be read again.

    Args:
        store: Where the table lies.
        table: Name of the table.
        version: A version that was held before the files were listed.
        files: Every file of the table.

    Raises:
        ServiceUnavailable: the storage failed, so nothing is known about the version.
    """
    try:
        paths = referenced(store, table, version=version)
    except ServiceUnavailable:
        if _has_log(files, version):
            raise
        return None
    return paths if paths <= {file.path for file in files} else None


def checkpoint(store: DeltaStore, table: str, *, every: int) -> bool:
    """Write a checkpoint if there were `every` commits since the last one; whether it did."""
    newest = store.delta(table).version()
    last = max(_checkpoints(TableFiles(store, table).all()), default=-1)
    if newest - last < every:
        return False
    with storage_errors(f"write a checkpoint of table {table}"):
        store.delta(table).create_checkpoint()
    return True


def clean_log(store: DeltaStore, table: str, *, held: set[int], older_than: datetime) -> int:
    """Remove the log before the newest checkpoint that is old enough and not after a held version.

    A version is read from the last checkpoint at or before it and the commits that follow. So
    everything before a checkpoint at or before all held versions can be removed.

    Args:
        store: Where the table lies.
        table: Name of the table.
        held: Versions that must stay readable.
        older_than: Versions that were written after this time stay readable, held or not.

    Returns:
        The number of removed files.
    """
    files = TableFiles(store, table)
    everything = files.all()
    floor = min(held, default=None)
    usable = [
        version
        for version, file in _checkpoints(everything).items()
        if file.modified_at < older_than and (floor is None or version <= floor)
    ]
    if not usable:
        return 0
    return _remove_before(files, version=max(usable))


def cut_log(store: DeltaStore, table: str) -> None:
    """Write a checkpoint and remove the log before it; older versions cannot be read any more.

    The checkpoint contains only the files of the newest version, and nothing about other files.
    """
    delta = store.delta(table)
    with storage_errors(f"write a checkpoint of table {table}"):
        delta.create_checkpoint()
    _remove_before(TableFiles(store, table), version=delta.version())


def _remove_before(files: TableFiles, *, version: int) -> int:
    unneeded = [file for number, file in log_versions(files.all()) if number < version]
    # Oldest first, so that after a crash the rest is still an unbroken end of the log.
    for file in sorted(unneeded, key=lambda file: file.path):
        files.remove(file)
    return len(unneeded)


def _has_log(files: list[StoredFile], version: int) -> bool:
    """Whether the log has every commit up to the version, from a checkpoint or the beginning on."""
    first = max((each for each in _checkpoints(files) if each <= version), default=-1)
    commits = {
        number for number, file in log_versions(files) if file.path.endswith(f"{number:020d}.json")
    }
    return commits.issuperset(range(first + 1, version + 1))


def _checkpoints(files: list[StoredFile]) -> dict[int, StoredFile]:
    """Checkpoints by version. Ours are always single files; other kinds are ignored."""
    return {
        version: file
        for version, file in log_versions(files)
        if file.path.endswith(f"{version:020d}.checkpoint.parquet")
    }
