"""What an erasure did, and the proof that nothing is left. It names nobody."""

from pydantic import AwareDatetime, BaseModel, ConfigDict


class ErasureReport(BaseModel):
    """The result of one erasure, over all of its attempts."""

    model_config = ConfigDict(frozen=True)

    erasure_id: str
    users: tuple[str, ...]
    """Digests of the erased hashes, one per tenant; see `erased.digest`."""
    tenants: tuple[str, ...]
    started_at: AwareDatetime
    finished_at: AwareDatetime
    num_sessions: int
    """Sessions that went as a whole."""
    num_interactions: int
    rows_deleted: dict[str, int]
    """By table."""
    files_removed: int
    """Data files removed from the storage."""
    snapshots_marked: tuple[str, ...]
    """Snapshots that held rows and cannot be read any more."""
    copies_forgotten: dict[str, int]
    """Entries by place outside the tables."""
    versions_trained: dict[str, int] | None
    """Policy versions that had learned from the rows, with how many; null when the registry did
    not answer: `onlinerl lineage` finds them later."""
    files_scanned: int
    """Files of the last look, logs included: that many were read and hold no trace."""
    bytes_scanned: int
    traces_left: int
    """Always 0 in a report: an erasure that leaves traces fails."""
