"""The record of what was decided: tables `promotions` and `audit`."""

from typing import Protocol

from onlinerl.rollout_store.rows import to_table
from onlinerl.rollout_store.schema import AuditRow, PromotionRow
from onlinerl.rollout_store.store import DeltaStore


class Journal(Protocol):
    """Append-only. A row whose id is there already counts once: readers take the first."""

    def promotion(self, row: PromotionRow) -> None:
        """A change of what serves, or a refusal."""
        ...

    def audit(self, row: AuditRow) -> None:
        """Who asked for what."""
        ...


class DeltaJournal:
    """In the rollout store."""

    def __init__(self, store: DeltaStore) -> None:
        self._store = store

    def promotion(self, row: PromotionRow) -> None:
        """One commit."""
        self._store.append("promotions", to_table([row]))

    def audit(self, row: AuditRow) -> None:
        """One commit."""
        self._store.append("audit", to_table([row]))


class MemoryJournal:
    """The twin."""

    def __init__(self) -> None:
        self.promotions: dict[str, PromotionRow] = {}
        self.audits: dict[str, AuditRow] = {}

    def promotion(self, row: PromotionRow) -> None:
        """First one wins, as for readers of the table."""
        self.promotions.setdefault(row.promotion_id, row)

    def audit(self, row: AuditRow) -> None:
        """First one wins."""
        self.audits.setdefault(row.audit_id, row)
