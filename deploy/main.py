"""`onlinerl deploy`, `promote`, `rollback` and `status`, assembled from the configuration."""

import logging
import os
import signal
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl.deploy import metrics
from onlinerl.deploy.gates.evidence import heldout_answers
from onlinerl.deploy.gates.examiner import Examiner
from onlinerl.deploy.promotion.commands import Commands, RollbackCommand, show_status
from onlinerl.deploy.promotion.controller import Controller, utc_now
from onlinerl.deploy.promotion.decisions import Decisions
from onlinerl.deploy.promotion.journal import DeltaJournal
from onlinerl.deploy.promotion.publisher import Publisher
from onlinerl.deploy.registry.base_checkpoint import base_checkpoint
from onlinerl.deploy.registry.protocol import Registry
from onlinerl.deploy.replicas.engine_control import HttpEngineControl
from onlinerl.deploy.replicas.fleet import Fleet
from onlinerl.errors import LeaseHeld, OnlineRLError, ServiceUnavailable
from onlinerl.process.fault_streak import FaultStreak
from onlinerl.process.health import HealthServer
from onlinerl.registry.checkpoint_cache import CheckpointCache
from onlinerl.registry.mlflow_registry import MlflowRegistry
from onlinerl.registry.mlflow_server import MlflowServer
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.secret_names import ENGINE_SECRET

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

_MAX_WAIT_S = 30.0
"""Longest wait between two passes that fail, unless `deploy.poll_s` is longer; seconds."""


def run_deploy(settings: "Settings") -> int:
    """Run the controller, one pass over the registry every `poll_s`, until SIGTERM or SIGINT.

    Raises:
        LeaseHeld: when another controller of this policy runs, or took over.
    """
    stop, store, registry = threading.Event(), _store(settings), real_registry(settings)
    checkpoints = CheckpointCache(_policy_folder(settings) / "checkpoints", registry)
    examiner = _examiner(settings, store, checkpoints)
    lease = _lease(settings, store)
    controller = _controller(settings, store, registry, checkpoints, examiner, lease)
    port = settings.deploy.health_port
    with _stopping(stop):
        # Before the health port is bound: a second controller names the first, not the port.
        trouble = _try_to_take(lease, store)
        try:
            with HealthServer("127.0.0.1", port, ready=lambda: controller.status):
                _wait_for_tables(lease, store, controller, stop, trouble)
                _loop(controller, stop, poll_s=settings.deploy.poll_s)
        finally:
            examiner.cancel()
            lease.give_back()
    return 0


def run_promote(settings: "Settings", version: int | None, actor: str) -> int:
    """Ask the controller to examine and promote a version, and wait for its answer.

    Args:
        settings: The configuration.
        version: Number of the version; None takes the candidate.
        actor: Who asks.
    """
    return _commands(settings).promote(version, actor=actor)


def run_rollback(settings: "Settings", version: int | None, actor: str, reason: str) -> int:
    """Ask the controller to serve an earlier version again, and wait for its answer.

    Args:
        settings: The configuration.
        version: Number of the version; None takes the one before the champion.
        actor: Who asks.
        reason: Why; it is stored in the tables.
    """
    return _commands(settings).roll_back(RollbackCommand(version, actor=actor, reason=reason))


def run_status(settings: "Settings") -> int:
    """Print the versions, the decisions about them, and the version of each engine."""
    try:
        controller = _lease(settings, _store(settings)).holder()
    except ServiceUnavailable as error:
        controller = f"unknown ({error})"
    return show_status(real_registry(settings), replicas(settings), controller=controller)


def real_registry(settings: "Settings") -> Registry:
    """The MLflow server of the configuration."""
    return MlflowRegistry(
        MlflowServer(settings.registry.tracking_uri, timeout_s=settings.deploy.request_timeout_s),
        policy=settings.policy.name,
        experiment=settings.registry.experiment,
    )


def replicas(settings: "Settings") -> list[HttpEngineControl]:
    """The engines that the gateway routes to."""
    return [
        HttpEngineControl(
            url,
            policy=settings.policy.name,
            request_timeout_s=settings.deploy.request_timeout_s,
            commit_timeout_s=settings.deploy.commit_timeout_s,
            probe_timeout_s=settings.deploy.probe.timeout_s,
            secret=os.environ.get(ENGINE_SECRET),
        )
        for url in settings.gateway.engines
    ]


def _store(settings: "Settings") -> DeltaStore:
    return DeltaStore(settings.store_root, settings.store.storage_options)


def _lease(settings: "Settings", store: DeltaStore) -> Lease:
    """One controller per policy and set of tables."""
    return Lease(
        store,
        name=f"deploy {settings.policy.name}",
        ttl_s=settings.deploy.lease_ttl_s,
        hint=_policy_folder(settings) / "controller.lease",
        heartbeat=True,
    )


def _folder(settings: "Settings") -> Path:
    return settings.folder("deploy")


def _policy_folder(settings: "Settings") -> Path:
    """One folder per policy, because version numbers of two policies are equal."""
    return _folder(settings) / settings.policy.name


def _commands(settings: "Settings") -> Commands:
    return Commands(
        real_registry(settings),
        lease=_lease(settings, _store(settings)),
        timeout_s=settings.deploy.command_timeout_s,
        poll_s=min(1.0, settings.deploy.poll_s),
    )


def _examiner(settings: "Settings", store: DeltaStore, checkpoints: CheckpointCache) -> Examiner:
    return Examiner(
        _policy_folder(settings) / "gates",
        checkpoints=checkpoints,
        answers=lambda: heldout_answers(
            store,
            rewards=settings.rewards,
            policy=settings.policy.name,
            heldout_fraction=settings.trainer.heldout_fraction,
            gates=settings.deploy.gates,
        ),
        config=settings.deploy,
    )


def _controller(
    settings: "Settings",
    store: DeltaStore,
    registry: Registry,
    checkpoints: CheckpointCache,
    examiner: Examiner,
    lease: Lease,
) -> Controller:
    policy = settings.policy
    publisher = Publisher(
        settings.weights_root,
        policy=policy.name,
        checkpoints=checkpoints,
        anchor_every=settings.deploy.anchor_every,
    )

    def register_base() -> int:
        target = _policy_folder(settings) / "base"
        base_checkpoint(policy.base_model, policy=policy.name, target=target)
        return registry.register_base(target)

    return Controller(
        registry,
        fleet=Fleet(
            replicas(settings), policy=policy.name, root=publisher.root, config=settings.deploy
        ),
        examiner=examiner,
        publisher=publisher,
        decisions=Decisions(registry, DeltaJournal(store), policy=policy.name, now=utc_now),
        config=settings.deploy,
        register_base=register_base,
        lease=lease,
    )


def _try_to_take(lease: Lease, store: DeltaStore) -> str | None:
    """Create the tables and take the lease in them; returns why the tables failed."""
    try:
        store.create()
        lease.take()
    except ServiceUnavailable as error:
        return str(error)
    return None


def _wait_for_tables(
    lease: Lease,
    store: DeltaStore,
    controller: Controller,
    stop: threading.Event,
    trouble: str | None,
) -> None:
    """Try to take the lease until it works or `stop` is set.

    A controller that ended instead would only be started again by its supervisor.
    """
    faults = FaultStreak()
    while trouble is not None and not stop.is_set():
        controller.status = f"cannot take the lease: {trouble}"
        if faults.add(trouble):
            logger.warning("%s", controller.status)
        stop.wait(faults.wait_s(1.0))
        trouble = _try_to_take(lease, store)


def _loop(controller: Controller, stop: threading.Event, *, poll_s: float) -> None:
    faults = FaultStreak(max_wait_s=_MAX_WAIT_S)
    while not stop.is_set():
        try:
            controller.tick()
        except LeaseHeld:
            raise
        except OnlineRLError as error:
            reason = str(error)
            if faults.add(reason):
                logger.warning("pass ended early: %s", reason)
        except Exception:  # process border: the next pass starts afresh
            reason = "the last pass over the registry failed; see the log"
            faults.add(reason)
            logger.exception("pass failed")
        else:
            # While engines are away some passes end early and some do not: a pass that leaves the
            # same trouble as the fault before it does not end the streak.
            if controller.status != faults.trouble:
                faults.clear()
            stop.wait(poll_s)
            continue
        metrics.ERRORS.inc()
        controller.status = reason
        stop.wait(faults.wait_s(poll_s))


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """Let SIGTERM and SIGINT set the event while the context is open."""

    def handle(number: int, frame: types.FrameType | None) -> None:
        stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
