"""Removes files that no version needs any more."""

from datetime import datetime, timedelta

from onlinerl.rollout_store.tables.delta_store import DeltaStore, storage_errors
from onlinerl.rollout_store.tables.files import TableFiles


def vacuum(
    store: DeltaStore, table: str, *, held: set[int], retention_hours: int, at: datetime
) -> list[str]:
    """Remove data files that neither the newest nor a held version refers to.

    A file is removed `retention_hours` after the commit that removed it from the table. A file that
    was never committed, or that a dead writer left unfinished, is removed that long after it was
    written. Until then a reader or a writer may still use it.

    Args:
        store: Where the tables lie.
        table: Name of the table.
        held: Versions that must stay readable.
        retention_hours: Hours for which unneeded files stay.
        at: The time now.

    Returns:
        Paths of the removed files, relative to the table's folder.

    Raises:
        ServiceUnavailable: a held version cannot be read; nothing was removed.
    """
    with storage_errors(f"vacuum table {table}"):
        # The library only lists the files. Its own removal would try to remove the same files again
        # for a week, and write two commits each time.
        unneeded = store.delta(table).vacuum(
            retention_hours,
            dry_run=True,
            enforce_retention_duration=False,
            full=True,
            keep_versions=sorted(held),
        )
    files = TableFiles(store, table)
    existing = {file.path: file for file in files.all()}
    until = at - timedelta(hours=retention_hours)
    unfinished = {
        path for path, file in existing.items() if file.is_unfinished and file.modified_at < until
    }
    listed = {str(path) for path in unneeded}
    listed = {path for path in listed & existing.keys() if not existing[path].is_log}
    removed = sorted(listed | unfinished)
    for path in removed:
        files.remove(existing[path])
    return removed
