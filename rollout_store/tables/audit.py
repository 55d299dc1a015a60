"""Appends acts to the table `audit`."""

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
    """Append one act.

    Args:
        store: Where the tables lie.
        actor: Operator or process that acts.
        action: Name of the action.
        subject: What it is done to: a version, a row, or a user's hash.
        detail: Details, stored as JSON.
        at: Time of the act.
        audit_id: Id of the act. Give one to an act that may be repeated, because the views show
            only the first row of each id; a random id when absent.
    """
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
