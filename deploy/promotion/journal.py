"""The record of what was decided: tables `promotions`, `audit` and `arms`."""

from collections.abc import Sequence
from typing import Protocol

from onlinerl.deploy.promotion.arms import checked, write_arms
from onlinerl.rollout_store.schema import ArmRow, AuditRow, PromotionRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table


class Journal(Protocol):
    """Append-only. A row whose id is there already counts once: readers take the first."""

    def promotion(self, row: PromotionRow) -> None:
        """A change of what serves, or a refusal."""
        ...

    def audit(self, row: AuditRow) -> None:
        """Who asked for what."""
        ...

    def arms(self, decision: Sequence[ArmRow]) -> None:
        """Which versions take part of the traffic; of several decisions the newest holds."""
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

    def arms(self, decision: Sequence[ArmRow]) -> None:
        """One commit."""
        write_arms(self._store, decision)


class MemoryJournal:
    """The twin."""

    def __init__(self) -> None:
        self.promotions: dict[str, PromotionRow] = {}
        self.audits: dict[str, AuditRow] = {}
        self.decisions: list[Sequence[ArmRow]] = []

    def promotion(self, row: PromotionRow) -> None:
        """First one wins, as for readers of the table."""
        self.promotions.setdefault(row.promotion_id, row)

    def audit(self, row: AuditRow) -> None:
        """First one wins."""
        self.audits.setdefault(row.audit_id, row)

    def arms(self, decision: Sequence[ArmRow]) -> None:
        """The last one holds."""
        self.decisions.append(checked(decision))
