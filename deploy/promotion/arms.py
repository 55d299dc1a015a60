"""Writes table `arms`, from which gateways read which versions take part of the traffic."""

import uuid
from collections.abc import Sequence
from datetime import datetime

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.schema import ArmRow
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.rows import to_table

_NAMESPACE = uuid.UUID("0d6d9f0c-52a4-4d2e-8f0c-7d6a3a1f5b11")


def champion_only(policy: str, version: int, *, reason: str, decided_at: datetime) -> list[ArmRow]:
    """The rows of a decision that gives a version all traffic and ends every canary and shadow.

    Args:
        policy: Name of the policy.
        version: Number of the champion.
        reason: Part of the id: a decision with the same policy, version and reason has the same id,
            so writing it again changes nothing.
        decided_at: Time of the decision, UTC.
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


def check_decision(decision: Sequence[ArmRow]) -> None:
    """Check that gateways can follow the rows of a decision.

    Raises:
        ConfigError: when there are no rows, they belong to several decisions, name an arm or a
            version twice, or name an adapter that is not called `POLICY@VERSION`.
    """
    if not decision:
        raise ConfigError("a decision about arms has no row: write one for the champion")
    for field in ("decision_id", "policy", "decided_at"):
        values = {getattr(row, field) for row in decision}
        if len(values) > 1:
            raise ConfigError(f"the rows of one decision about arms differ in {field}: {values}")
    if len({row.arm for row in decision}) < len(decision):
        raise ConfigError(f"a decision about arms names the same arm twice: {list(decision)}")
    if len({row.version for row in decision}) < len(decision):
        raise ConfigError(f"a decision about arms names the same version twice: {list(decision)}")
    for row in decision:
        _check_adapter(row)


def _check_adapter(row: ArmRow) -> None:
    """The name of an adapter is logged as the version of its tokens."""
    if row.adapter is not None and row.adapter != f"{row.policy}@{row.version}":
        raise ConfigError(
            f"the adapter of {row.policy}/{row.version} is called {row.adapter!r}; "
            f"it has to be {row.policy}@{row.version}"
        )


def write_arms(store: DeltaStore, decision: Sequence[ArmRow]) -> None:
    """Store one decision in one commit, so that gateways see all of it or nothing.

    Raises:
        ConfigError: when gateways could not follow the decision; see `check_decision`.
        ServiceUnavailable: when the table cannot be written.
    """
    check_decision(decision)
    store.append("arms", to_table(list(decision)))
