"""`onlinerl train`: one cycle with its real parts, in this process."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from onlinerl.errors import ConfigError, DependencyMissing, ServiceUnavailable
from onlinerl.trainer.backend import TrainingBackend
from onlinerl.trainer.cycle import run_cycle
from onlinerl.trainer.database import Database
from onlinerl.trainer.lease import Lease
from onlinerl.trainer.ledger import Ledger
from onlinerl.trainer.parts import FAULTS, Parts
from onlinerl.trainer.plan import Plan

if TYPE_CHECKING:
    from onlinerl.config import Settings

logger = logging.getLogger(__name__)

FAULT_VARIABLE = "ONLINERL_TRAINER_FAULT"
"""Tests only: the process kills itself at the point of `parts.FAULTS` that this names."""

DATABASE = "ledger.sqlite"


def run_train(settings: "Settings", snapshot: str | None = None) -> int:
    """Run one cycle; a signal ends it where it is and the next call repeats its window.

    With the name of a snapshot, a new window is chosen from the rows that it holds.

    Raises:
        LeaseHeld: when another trainer works on this policy.
        TooFewRows: when there is not enough to learn from.
        ServiceUnavailable: when the registry or the tables do not answer.
        TrainingError: when no update can be computed from the window.
    """
    _quiet_libraries()
    database = open_database(settings)
    with (
        _registry_errors(),
        _stopped_by_signals(),
        Lease(database, name=lease_name(settings), ttl_s=settings.trainer.lease_ttl_s) as lease,
    ):
        parts = real_parts(settings, database)
        if snapshot is not None:
            parts = _reading_from(snapshot, parts, settings)
        cycle = run_cycle(parts, lease=lease)
    logger.info("registered a candidate", extra={"cycle": cycle.cycle_id, "version": cycle.version})
    return 0


def run_schedule(settings: "Settings") -> int:
    """Run cycles when they are due, until a signal."""
    from onlinerl.trainer.schedule import run

    return run(settings)


def open_database(settings: "Settings") -> Database:
    """The ledger's file below the data folder."""
    return Database(settings.folder("trainer") / DATABASE)


def lease_name(settings: "Settings") -> str:
    """One trainer per policy."""
    return f"train {settings.policy.name}"


def real_parts(settings: "Settings", database: Database) -> Parts:
    """A cycle's parts as configured: Delta tables, MLflow, torch.

    Raises:
        ConfigError: when a KL is asked for and no base model is named.
    """
    from onlinerl.rollout_store.store import DeltaStore
    from onlinerl.trainer.figures import draw_all
    from onlinerl.trainer.mlflow_registry import MlflowRegistry
    from onlinerl.trainer.mlflow_tracking import MlflowTracker
    from onlinerl.trainer.progress import terminal_progress
    from onlinerl.trainer.source import DeltaSource

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


def _reading_from(snapshot: str, parts: Parts, settings: "Settings") -> Parts:
    from onlinerl.rollout_store.snapshots import readable
    from onlinerl.rollout_store.store import DeltaStore
    from onlinerl.trainer.source import DeltaSource

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
    from onlinerl.trainer.torch_backend import TorchBackend

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


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """While open, SIGTERM and SIGINT raise SystemExit(0), so that the lease is given back."""
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    logger.info("stopping", extra={"signal": number})
    raise SystemExit(0)


@contextmanager
def _registry_errors() -> Iterator[None]:
    """What mlflow raises in mid-cycle, as an error that says what happens next."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise ServiceUnavailable(
            f"the registry failed: {error.message}; the next cycle repeats this window"
        ) from error


def _quiet_libraries() -> None:
    """Bars of transformers are for people at a prompt; this is a job."""
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise DependencyMissing(f"{error}; install onlinerl[trainer]") from error
    transformers_logging.disable_progress_bar()
