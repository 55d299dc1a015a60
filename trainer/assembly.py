"""The parts of a cycle as configured: Delta tables, MLflow, torch."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import (
    PolicyConfig,
    RegistryConfig,
    RewardsConfig,
    StoreConfig,
)
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.trainer.backend.protocol import TrainingBackend
from onlinerl.trainer.bookkeeping.database import Database
from onlinerl.trainer.bookkeeping.ledger import Ledger
from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.cycle.parts import FAULTS, Parts

if TYPE_CHECKING:
    from onlinerl.rollout_store.tables.delta_store import DeltaStore
    from onlinerl.trainer.rollouts.source import DeltaSource

FAULT_VARIABLE = "ONLINERL_TRAINER_FAULT"
"""Tests only: the process kills itself at the point of `parts.FAULTS` that this names."""

DATABASE = "ledger.sqlite"


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The sections of the configuration that training needs."""

    policy: PolicyConfig
    registry: RegistryConfig
    rewards: RewardsConfig
    store: StoreConfig
    store_root: str
    """Where the tables lie: a local path or an object-store URI."""
    trainer: TrainerConfig
    folder: Path
    """The trainer's own folder below the data folder."""


def open_database(folder: Path) -> Database:
    """The ledger below the trainer's folder; created when missing."""
    return Database(folder / DATABASE)


def lease_name(settings: TrainerSettings) -> str:
    """One trainer per policy."""
    return f"train {settings.policy.name}"


def trainer_lease(settings: TrainerSettings, database: Database) -> Lease:
    """The lease of this policy's trainer; its fence stays above any that the ledger has seen."""
    name = lease_name(settings)
    return Lease(
        _open_store(settings),
        name=name,
        ttl_s=settings.trainer.lease_ttl_s,
        hint=settings.folder / f"{settings.policy.name}.lease",
        min_fence=Ledger(database).highest_fence(name),
        heartbeat=True,
    )


def real_parts(settings: TrainerSettings, database: Database) -> Parts:
    """The parts of a cycle: Delta tables, MLflow, torch.

    Raises:
        ConfigError: a KL penalty is configured without a base model, or the environment names an
            unknown fault.
    """
    from onlinerl.registry.mlflow_registry import MlflowRegistry
    from onlinerl.registry.mlflow_server import MlflowServer
    from onlinerl.trainer.cycle.figures import draw_all
    from onlinerl.trainer.cycle.progress import terminal_progress
    from onlinerl.trainer.tracking.mlflow import MlflowTracker

    policy, registry, trainer = settings.policy, settings.registry, settings.trainer
    if trainer.kl_coef > 0 and not policy.base_model:
        raise ConfigError(
            f"policy.base_model is empty but trainer.kl_coef ({trainer.kl_coef:g}) needs the "
            "base model; set one or kl_coef = 0"
        )
    server = MlflowServer(registry.tracking_uri, timeout_s=trainer.registry_timeout_s)
    return Parts(
        policy=policy.name,
        base_model=policy.base_model,
        config=trainer,
        rewards=settings.rewards,
        folder=settings.folder,
        ledger=Ledger(database),
        source=_open_source(settings),
        registry=MlflowRegistry(server, policy=policy.name, experiment=registry.experiment),
        tracker=MlflowTracker(server, experiment=registry.experiment),
        open_backend=_open_torch,
        draw_figures=draw_all,
        progress=terminal_progress,
        fault=_fault_from_environment(),
    )


def read_from_snapshot(snapshot: str, parts: Parts, settings: TrainerSettings) -> Parts:
    """`parts` whose window is chosen from the rows that a snapshot holds."""
    from onlinerl.rollout_store.snapshots.named import readable

    held = readable(_open_store(settings), snapshot, at=datetime.now(UTC))
    return replace(parts, source=_open_source(settings, pinned=held.versions))


def _open_store(settings: TrainerSettings) -> "DeltaStore":
    from onlinerl.rollout_store.tables.delta_store import DeltaStore

    return DeltaStore(settings.store_root, settings.store.storage_options)


def _open_source(
    settings: TrainerSettings, *, pinned: Mapping[str, int] | None = None
) -> "DeltaSource":
    from onlinerl.trainer.rollouts.source import DeltaSource

    return DeltaSource(
        _open_store(settings),
        rewards=settings.rewards,
        hold_s=settings.trainer.hold_s,
        pinned=pinned,
        limits=settings.store,
    )


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
