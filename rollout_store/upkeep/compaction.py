"""Merges the small files of a partition into large ones; the rows stay the same."""

from dataclasses import dataclass

import duckdb
import pyarrow as pa
from deltalake.exceptions import CommitFailedError

from onlinerl.rollout_store.tables.delta_store import WRITER_PROPERTIES, DeltaStore, storage_errors

_SMALL = """
SELECT "partition.ingest_date"::VARCHAR AS day FROM files WHERE size_bytes < $below
GROUP BY day HAVING count(*) >= $least ORDER BY day
"""


@dataclass(frozen=True, kw_only=True)
class Compacted:
    """The result of compacting one table."""

    num_files_before: int = 0
    num_files_after: int = 0
    num_conflicts: int = 0
    """Partitions that were left as they are because rows of them were deleted meanwhile."""


def compact(
    store: DeltaStore, table: str, *, target_file_bytes: int, min_small_files: int
) -> Compacted:
    """Rewrite the small files of every partition that has enough of them, one commit each.

    Appends and reads continue meanwhile. If a compaction and a deletion change the same file, one
    of them fails: a deletion is repeated, a compaction waits for the next pass.

    Args:
        store: Where the tables lie.
        table: Name of the table.
        target_file_bytes: A file below this size is small; rewritten files have about this size.
        min_small_files: Small files that a partition must have to be compacted.
    """
    totals = Compacted()
    for day in _days_to_compact(
        store, table, target_file_bytes=target_file_bytes, min_small_files=min_small_files
    ):
        try:
            with storage_errors(f"compact table {table}"):
                figures = store.delta(table).optimize.compact(
                    partition_filters=[("ingest_date", "=", day)],
                    target_size=target_file_bytes,
                    max_concurrent_tasks=1,
                    writer_properties=WRITER_PROPERTIES,
                )
        except CommitFailedError:
            totals = _plus(totals, conflicts=1)
            continue
        totals = _plus(totals, before=figures["numFilesRemoved"], after=figures["numFilesAdded"])
    return totals


def _days_to_compact(
    store: DeltaStore, table: str, *, target_file_bytes: int, min_small_files: int
) -> list[str]:
    files = pa.table(store.delta(table).get_add_actions(flatten=True))
    if files.num_rows < min_small_files:
        return []
    with duckdb.connect(":memory:") as connection:
        connection.register("files", files)
        rows = connection.execute(
            _SMALL, {"below": target_file_bytes, "least": min_small_files}
        ).fetchall()
    return [str(day) for (day,) in rows]


def _plus(totals: Compacted, *, before: int = 0, after: int = 0, conflicts: int = 0) -> Compacted:
    return Compacted(
        num_files_before=totals.num_files_before + before,
        num_files_after=totals.num_files_after + after,
        num_conflicts=totals.num_conflicts + conflicts,
    )
