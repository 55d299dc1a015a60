"""Files that no version needs any more, and their removal."""

from onlinerl.rollout_store.store import DeltaStore, storage_errors
from onlinerl.rollout_store.table_files import TableFiles


def vacuum(store: DeltaStore, table: str, *, held: set[int], retention_hours: int) -> list[str]:
    """Remove data files that neither the newest nor a held version refers to.

    A file goes `retention_hours` after the commit that gave it up, or, when it never was in a
    commit, after it was written: until then a reader or a writer may be at it.

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
    if not unneeded:
        return []
    files = TableFiles(store, table)
    there = {file.path: file for file in files.all() if not file.is_log}
    removed = [str(path) for path in unneeded if str(path) in there]
    for path in removed:
        files.remove(there[path])
    return removed
