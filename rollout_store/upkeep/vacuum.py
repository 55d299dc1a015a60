"""Files that no version needs any more, and their removal."""

from datetime import datetime, timedelta

from onlinerl.rollout_store.tables.delta_store import DeltaStore, storage_errors
from onlinerl.rollout_store.tables.files import TableFiles


def vacuum(
    store: DeltaStore, table: str, *, held: set[int], retention_hours: int, at: datetime
) -> list[str]:
    """Remove data files that neither the newest nor a held version refers to.

    A file goes `retention_hours` after the commit that gave it up, or, when it never was in a
    commit, after it was written: until then a reader or a writer may be at it. So does what a
    writer that died left unfinished.

    Returns:
        Paths of what was removed, relative to the table's folder.

    Raises:
        ServiceUnavailable: a held version cannot be read; nothing was removed.
    """
    with storage_errors(f"vacuum table {table}"):
        # The library only says what may go. Its own removal would go over files that are gone
        # already, for a week, and write two commits each time.
        unneeded = store.delta(table).vacuum(
            retention_hours,
            dry_run=True,
            enforce_retention_duration=False,
            full=True,
            keep_versions=sorted(held),
        )
    files = TableFiles(store, table)
    there = {file.path: file for file in files.all()}
    until = at - timedelta(hours=retention_hours)
    left = [path for path, file in there.items() if file.is_unfinished and file.modified_at < until]
    named = [str(path) for path in unneeded if str(path) in there and not there[str(path)].is_log]
    removed = sorted({*named, *left})
    for path in removed:
        files.remove(there[path])
    return removed
