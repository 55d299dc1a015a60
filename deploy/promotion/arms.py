"""Says which versions take part of the traffic: rows of table `arms`, which gateways read."""

import uuid
from collections.abc import Sequence
from datetime import datetime

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.schema import ArmRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table

_NAMESPACE = uuid.UUID("0d6d9f0c-52a4-4d2e-8f0c-7d6a3a1f5b11")


def champion_only(policy: str, version: int, *, reason: str, decided_at: datetime) -> list[ArmRow]:
    """A decision that ends every canary and shadow.

    Args:
        policy: Name of the policy.
        version: Of the champion.
        reason: Makes the id, so that writing the decision once more changes nothing.
        decided_at: When, UTC.
    """
    decision_id = str(uuid.uuid5(_NAMESPACE, f"{policy}/{version} {reason}"))
    return [
        ArmRow(
            decision_id=decision_id,
            policy=policy,
            arm="champion",
            version=version,
            share=1.0,
            decided_at=decided_at,
            ingest_date=decided_at.date(),
        )
    ]


def checked(decision: Sequence[ArmRow]) -> Sequence[ArmRow]:
    """The rows of one decision.

    Raises:
        ConfigError: when they are not one decision, name an arm twice, or let two arms serve the
            same weights.
    """
    if not decision:
        raise ConfigError("a decision about arms has no row; write one of the champion")
    for field in ("decision_id", "policy", "decided_at"):
        values = {getattr(row, field) for row in decision}
        if len(values) > 1:
            raise ConfigError(f"the rows of a decision about arms differ in {field}: {values}")
    if len({row.arm for row in decision}) < len(decision):
        raise ConfigError(f"a decision about arms names the same arm twice: {list(decision)}")
    if len({row.version for row in decision}) < len(decision):
        raise ConfigError(f"a decision about arms names the same version twice: {list(decision)}")
    for row in decision:
        _check_adapter(row)
    return decision


def _check_adapter(row: ArmRow) -> None:
    """Its name is the version of its tokens."""
    if row.adapter is not None and row.adapter != f"{row.policy}@{row.version}":
        raise ConfigError(
            f"the adapter of {row.policy}/{row.version} is called {row.adapter!r}; "
            f"it has to be {row.policy}@{row.version}"
        )


def write_arms(store: DeltaStore, decision: Sequence[ArmRow]) -> None:
    """Store one decision, in one commit: gateways see all of it or nothing.

    Raises:
        ConfigError: when it is not a decision that gateways can follow.
        ServiceUnavailable: when the table cannot be written.
    """
    store.append("arms", to_table(list(checked(decision))))
