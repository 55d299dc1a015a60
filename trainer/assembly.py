"""The parts of a cycle as configured: Delta tables, MLflow, torch."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.trainer.backend.protocol import TrainingBackend
from onlinerl.trainer.bookkeeping.database import Database
from onlinerl.trainer.bookkeeping.ledger import Ledger
from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.cycle.parts import FAULTS, Parts

if TYPE_CHECKING:
    from onlinerl.settings import Settings

FAULT_VARIABLE = "ONLINERL_TRAINER_FAULT"
"""Tests only: the process kills itself at the point of `parts.FAULTS` that this names."""

DATABASE = "ledger.sqlite"


def open_database(settings: "Settings") -> Database:
    """The ledger's file below the data folder."""
    return Database(settings.folder("trainer") / DATABASE)


def lease_name(settings: "Settings") -> str:
    """One trainer per policy."""
    return f"train {settings.policy.name}"


def trainer_lease(settings: "Settings", database: Database) -> Lease:
    """The lease of this policy's trainer. Its fence stays above any that the ledger has seen."""
    from onlinerl.rollout_store.tables.delta_store import DeltaStore

    name = lease_name(settings)
    return Lease(
        DeltaStore(settings.store_root, settings.store.storage_options),
        name=name,
        ttl_s=settings.trainer.lease_ttl_s,
        hint=settings.folder("trainer") / f"{settings.policy.name}.lease",
        min_fence=Ledger(database).highest_fence(name),
        heartbeat=True,
    )


def real_parts(settings: "Settings", database: Database) -> Parts:
    """A cycle's parts as configured: Delta tables, MLflow, torch.

    Raises:
        ConfigError: when a KL is asked for and no base model is named.
    """
    from onlinerl.rollout_store.tables.delta_store import DeltaStore
    from onlinerl.trainer.cycle.figures import draw_all
    from onlinerl.trainer.cycle.progress import terminal_progress
    from onlinerl.trainer.registry.mlflow import MlflowRegistry
    from onlinerl.trainer.rollouts.source import DeltaSource
    from onlinerl.trainer.tracking.mlflow import MlflowTracker

    policy, registry = settings.policy, settings.registry
    if settings.trainer.kl_coef > 0 and not policy.base_model:
        raise ConfigError(
            "policy.base_model is empty but trainer.kl_coef "
            f"({settings.trainer.kl_coef:g}) needs the base model; set one or kl_coef = 0"
        )
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    return Parts(
        policy=policy.name,
        base_model=policy.base_model,
        config=settings.trainer,
        rewards=settings.rewards,
        folder=settings.folder("trainer"),
        ledger=Ledger(database),
        source=DeltaSource(
            store,
            rewards=settings.rewards,
            hold_s=settings.trainer.hold_s,
            limits=settings.store,
        ),
        registry=MlflowRegistry(
            registry.tracking_uri,
            policy=policy.name,
            timeout_s=settings.trainer.registry_timeout_s,
        ),
        tracker=MlflowTracker(registry.tracking_uri, experiment=registry.experiment),
        open_backend=_open_torch,
        draw_figures=draw_all,
        progress=terminal_progress,
        fault=_fault_from_environment(),
    )


def reading_from(snapshot: str, parts: Parts, settings: "Settings") -> Parts:
    """`parts` whose window is chosen from the rows that a snapshot holds."""
    from onlinerl.rollout_store.snapshots.named import readable
    from onlinerl.rollout_store.tables.delta_store import DeltaStore
    from onlinerl.trainer.rollouts.source import DeltaSource

    store = DeltaStore(settings.store_root, settings.store.storage_options)
    held = readable(store, snapshot, at=datetime.now(UTC))
    source = DeltaSource(
        store,
        rewards=settings.rewards,
        hold_s=settings.trainer.hold_s,
        pinned=held.versions,
        limits=settings.store,
    )
    return replace(parts, source=source)


def _open_torch(parent: Path, *, plan: Plan) -> TrainingBackend:
    from onlinerl.trainer.backend.torch_backend import TorchBackend

    base = plan.base_model if plan.trainer.kl_coef > 0 else None
    return TorchBackend(parent, base=base, config=plan.trainer, seed=plan.seed)


def _fault_from_environment() -> Callable[[str], None]:
    chosen = os.environ.get(FAULT_VARIABLE)
    if chosen is not None and chosen not in FAULTS:
        raise ConfigError(f"{FAULT_VARIABLE}={chosen} is none of {', '.join(FAULTS)}")

    def fault(point: str) -> None:
        if point == chosen:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault
