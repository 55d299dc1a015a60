"""The report of an erasure: what was removed, and the proof that nothing is left; names nobody."""

from pydantic import AwareDatetime, BaseModel, ConfigDict


class ErasureReport(BaseModel):
    """The result of one erasure, over all of its attempts."""

    model_config = ConfigDict(frozen=True)

    erasure_id: str
    users: tuple[str, ...]
    """Digests of the erased user hashes, one per tenant; see `erased.digest`."""
    tenants: tuple[str, ...]
    started_at: AwareDatetime
    finished_at: AwareDatetime
    num_sessions: int
    """Sessions that were erased as a whole."""
    num_interactions: int
    rows_deleted: dict[str, int]
    """Deleted rows by table."""
    files_removed: int
    """Data files removed from the storage."""
    snapshots_marked: tuple[str, ...]
    """Snapshots that held such rows and cannot be read any more."""
    copies_forgotten: dict[str, int]
    """Removed entries by place outside the tables."""
    versions_trained: dict[str, int] | None
    """Policy versions that were trained on the rows, with the number of rows; null when the
    registry did not answer. `onlinerl lineage` finds them later."""
    files_scanned: int
    """Files that the last scan read, logs included; none of them holds a trace."""
    bytes_scanned: int
    traces_left: int
    """Always 0 in a report: an erasure that leaves traces fails."""
