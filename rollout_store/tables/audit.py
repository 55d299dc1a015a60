"""Who did what, appended to the table `audit`."""

import json
import uuid
from collections.abc import Mapping
from datetime import datetime

from onlinerl.rollout_store.schema import AuditRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table


def record_act(
    store: DeltaStore,
    *,
    actor: str,
    action: str,
    subject: str,
    detail: Mapping[str, object],
    at: datetime,
    audit_id: str | None = None,
) -> None:
    """One row. A repeat with the same `audit_id` is one act: the views show its first report."""
    row = AuditRow(
        audit_id=audit_id or uuid.uuid4().hex,
        actor=actor,
        action=action,
        subject=subject,
        detail=json.dumps(detail, sort_keys=True, default=str),
        acted_at=at,
        ingest_date=at.date(),
    )
    store.append("audit", to_table([row]))
