"""One pass of upkeep over all tables: retention, compaction, checkpoint, log, vacuum.

Every step can be repeated or left out, so a pass that dies loses only its own work.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from onlinerl.errors import LeaseHeld, OnlineRLError
from onlinerl.rollout_store.erasure.resurrection import remove_resurrected
from onlinerl.rollout_store.schema import TABLES
from onlinerl.rollout_store.snapshots.pins import held_versions
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.log import checkpoint, clean_log
from onlinerl.rollout_store.upkeep.compaction import Compacted, compact
from onlinerl.rollout_store.upkeep.config import MaintenanceConfig, RetentionConfig
from onlinerl.rollout_store.upkeep.retention import expire
from onlinerl.rollout_store.upkeep.vacuum import vacuum

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TableUpkeep:
    """What one pass did to one table."""

    table: str
    compacted: Compacted = field(default_factory=Compacted)
    checkpointed: bool = False
    num_log_files_removed: int = 0
    num_files_removed: int = 0
    num_held_versions: int = 0
    trouble: str | None = None
    """The error that left the rest of the table's upkeep to the next pass."""

    @property
    def changed(self) -> bool:
        """Whether files were rewritten or removed."""
        return bool(
            self.compacted.num_files_before or self.num_files_removed or self.num_log_files_removed
        )


def maintain(
    store: DeltaStore,
    *,
    config: MaintenanceConfig,
    retention: RetentionConfig,
    actor: str,
    now: Callable[[], datetime],
    keep_alive: Callable[[], None] = lambda: None,
) -> Iterator[TableUpkeep]:
    """Make one pass; yields the result of each table.

    Args:
        store: Where the tables lie; missing tables are created.
        config: Sizes and times.
        retention: For how long rows are kept.
        actor: Who acts, for the table `audit`.
        now: The time.
        keep_alive: Called between steps; an exception that it raises ends the pass.
    """
    store.create()
    for expired in expire(store, retention, actor=actor, at=now()):
        logger.info("retention", extra={"table": expired.table, "rows": expired.num_rows})
    keep_alive()
    remove_resurrected(store, actor=actor, at=now())
    for table in TABLES:
        keep_alive()
        upkeep = _upkeep(store, table, config=config, at=now())
        if upkeep.changed:
            _record(store, upkeep, actor=actor, at=now())
        yield upkeep


def _upkeep(
    store: DeltaStore, table: str, *, config: MaintenanceConfig, at: datetime
) -> TableUpkeep:
    """Like `keep_up`, but an error is a result, so that it does not stop the other tables."""
    try:
        return keep_up(store, table, config=config, at=at)
    except LeaseHeld:
        raise
    except OnlineRLError as error:
        logger.warning("upkeep of %s goes on at the next pass: %s", table, error)
        return TableUpkeep(table=table, trouble=str(error))


def keep_up(
    store: DeltaStore, table: str, *, config: MaintenanceConfig, at: datetime
) -> TableUpkeep:
    """Compact one table, write a checkpoint, vacuum it and clean its log."""
    compacted = compact(
        store,
        table,
        target_file_bytes=config.target_file_bytes,
        min_small_files=config.min_small_files,
    )
    checkpointed = checkpoint(store, table, every=config.checkpoint_every)
    # The held versions are read again for each table, right before files are removed. A later hold
    # is on a version whose files are younger than `retention_hours`.
    held = held_versions(store, at=at).get(table, set())
    removed = vacuum(store, table, held=held, retention_hours=config.retention_hours, at=at)
    older_than = at - timedelta(hours=config.log_retention_hours)
    return TableUpkeep(
        table=table,
        compacted=compacted,
        checkpointed=checkpointed,
        num_log_files_removed=clean_log(store, table, held=held, older_than=older_than),
        num_files_removed=len(removed),
        num_held_versions=len(held),
    )


def _record(store: DeltaStore, upkeep: TableUpkeep, *, actor: str, at: datetime) -> None:
    record_act(
        store,
        actor=actor,
        action="maintain",
        subject=upkeep.table,
        detail={
            "files_compacted": upkeep.compacted.num_files_before,
            "files_written": upkeep.compacted.num_files_after,
            "files_removed": upkeep.num_files_removed,
            "log_files_removed": upkeep.num_log_files_removed,
        },
        at=at,
    )
