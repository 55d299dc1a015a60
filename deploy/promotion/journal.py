"""Records what was decided, in the tables `promotions`, `audit` and `arms`."""

from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from onlinerl.deploy.promotion.arms import check_decision, write_arms
from onlinerl.rollout_store.schema import ArmRow, AuditRow, PromotionRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table


class Journal(Protocol):
    """An append-only record. Of several rows with one id, readers take the first."""

    def promotion(self, row: PromotionRow) -> None:
        """Record that another version serves, or that one was refused."""
        ...

    def audit(self, row: AuditRow) -> None:
        """Record who asked for what."""
        ...

    def arms(self, decision: Sequence[ArmRow]) -> None:
        """Record which versions take part of the traffic; the newest decision counts.

        Raises:
            ConfigError: when gateways could not follow the decision.
        """
        ...


class DeltaJournal(Journal):
    """The record in the rollout store; every call is one commit."""

    def __init__(self, store: DeltaStore) -> None:
        self._store = store

    @override
    def promotion(self, row: PromotionRow) -> None:
        self._store.append("promotions", to_table([row]))

    @override
    def audit(self, row: AuditRow) -> None:
        self._store.append("audit", to_table([row]))

    @override
    def arms(self, decision: Sequence[ArmRow]) -> None:
        write_arms(self._store, decision)


class MemoryJournal(Journal):
    """The twin for unit tests."""

    def __init__(self) -> None:
        self.promotions: dict[str, PromotionRow] = {}
        self.audits: dict[str, AuditRow] = {}
        self.decisions: list[Sequence[ArmRow]] = []

    @override
    def promotion(self, row: PromotionRow) -> None:
        self.promotions.setdefault(row.promotion_id, row)

    @override
    def audit(self, row: AuditRow) -> None:
        self.audits.setdefault(row.audit_id, row)

    @override
    def arms(self, decision: Sequence[ArmRow]) -> None:
        check_decision(decision)
        self.decisions.append(decision)
