"""Trains a planned cycle: the update, its MLflow run, its figures and its lineage."""

from pathlib import Path

from onlinerl.errors import TrainingError
from onlinerl.process.files import replaced_folder
from onlinerl.registry.checkpoint import write_manifest
from onlinerl.registry.checkpoint_cache import CheckpointCache
from onlinerl.trainer.backend.batches import split_into_steps
from onlinerl.trainer.backend.protocol import TrainingBackend
from onlinerl.trainer.bookkeeping.ledger import Cycle
from onlinerl.trainer.cycle.outcome import Outcome, outcome_folder, write_outcome
from onlinerl.trainer.cycle.parts import Parts
from onlinerl.trainer.cycle.report import (
    describe,
    how_it_ended,
    window_metrics,
    write_config,
    write_lineage,
)
from onlinerl.trainer.rollouts.advantages import Advantages, compute_advantages
from onlinerl.trainer.rollouts.segments import build_data
from onlinerl.trainer.training.loop import History, OnStep, check_there_is_a_signal, train

KEPT_PARENTS = 2
"""Downloaded versions that stay on disk: the parent and the one before it, for a rollback."""


def train_cycle(parts: Parts, cycle: Cycle) -> None:
    """Train the cycle and write its outcome folder.

    Raises:
        TrainingError: no update can be computed from the window.
        WeightsError: the registry's copy of the parent is damaged or missing.
        ServiceUnavailable: the registry or the tables do not answer.
    """
    plan = cycle.plan
    advantages = compute_advantages(
        plan.rows, baselines=plan.baselines, decay=plan.trainer.baseline_decay
    )
    segments = parts.source.segments(plan.keys, at=plan.table_versions)
    steps = split_into_steps(
        build_data(segments, rows=plan.rows, advantages=advantages),
        tokens_per_step=plan.trainer.tokens_per_step,
        epochs=plan.trainer.epochs,
        seed=plan.seed,
    )
    check_there_is_a_signal(steps)
    parent = _fetch_parent(parts, version=plan.parent_version)
    parts.fault("parent_fetched")
    backend = parts.open_backend(parent, plan=plan)
    parts.tracker.supersede(cycle.cycle_id)
    run_id = start_run(parts, cycle)
    try:
        history = train(
            backend,
            steps,
            config=plan.trainer,
            fresh=frozenset(row.key for row in plan.rows if row.version == plan.parent_version),
            on_step=_on_step(parts, run_id, num_steps=len(steps)),
        )
    except TrainingError as error:
        parts.tracker.set_tags(run_id, {"onlinerl.failure": str(error)[:4000]})
        parts.tracker.finish(run_id, status="FAILED")
        raise
    _write(parts, cycle, backend=backend, history=history, advantages=advantages, run_id=run_id)
    parts.fault("outcome_written")


def _fetch_parent(parts: Parts, *, version: int) -> Path:
    cache = CheckpointCache(parts.folder / "models", parts.registry)
    parent = cache.get(version, verify_again=True)
    cache.keep_newest(KEPT_PARENTS, besides=parent)
    return parent


def start_run(parts: Parts, cycle: Cycle) -> str:
    """Open the MLflow run of a cycle, with its id as a tag and its configuration as parameters."""
    plan = cycle.plan
    run_id = parts.tracker.start(
        cycle.cycle_id,
        tags={
            "onlinerl.cycle": cycle.cycle_id,
            "onlinerl.policy": plan.policy,
            "onlinerl.parent_version": str(plan.parent_version),
            "onlinerl.attempt": str(cycle.attempts + 1),
        },
        params={name: str(value) for name, value in plan.trainer.model_dump().items()}
        | {"parent_version": str(plan.parent_version), "cycle_seed": str(plan.seed)},
    )
    parts.tracker.log_metrics(run_id, window_metrics(plan), step=0)
    return run_id


def _on_step(parts: Parts, run_id: str, *, num_steps: int) -> OnStep:
    progress = parts.progress(num_steps)

    def on_step(number: int, metrics: dict[str, float]) -> None:
        parts.tracker.log_metrics(run_id, metrics, step=number)
        progress(number, metrics)
        parts.fault("first_step")

    return on_step


def _write(
    parts: Parts,
    cycle: Cycle,
    *,
    backend: TrainingBackend,
    history: History,
    advantages: Advantages,
    run_id: str,
) -> None:
    plan, cycle_id = cycle.plan, cycle.cycle_id
    with replaced_folder(outcome_folder(parts.folder, cycle_id)) as folder:
        backend.save_weights(folder / "checkpoint")
        write_manifest(
            folder / "checkpoint",
            policy=plan.policy,
            cycle=cycle_id,
            parent_version=plan.parent_version,
        )
        parts.draw_figures(folder / "figures", plan=plan, history=history, title=cycle_id)
        write_lineage(folder / "lineage", plan=plan, advantages=advantages)
        write_config(folder / "config", plan=plan)
        end = how_it_ended(history)
        outcome = Outcome(
            run_id=run_id,
            description=describe(plan, cycle_id=cycle_id, steps=history.steps, end=end),
            baselines=advantages.baselines,
            steps=history.steps,
            stopped=history.stopped,
        )
        write_outcome(folder, outcome)
