"""Registers the outcome of a trained cycle as a candidate."""

from onlinerl.trainer.bookkeeping.ledger import Cycle
from onlinerl.trainer.cycle.outcome import UPLOADED, Outcome, outcome_folder
from onlinerl.trainer.cycle.parts import Parts
from onlinerl.trainer.cycle.report import version_tags


def publish(parts: Parts, cycle: Cycle, *, outcome: Outcome) -> int:
    """Upload the outcome to its run and register the candidate; safe to repeat at any point."""
    version = parts.registry.version_of(cycle.cycle_id)
    if version is None:
        folder = outcome_folder(parts.folder, cycle.cycle_id)
        for name in UPLOADED:
            parts.tracker.log_folder(outcome.run_id, folder / name, artifact_path=name)
        parts.fault("uploaded")
        version = parts.registry.create_version(
            run_id=outcome.run_id,
            artifact_path="checkpoint",
            tags=version_tags(cycle.plan, cycle_id=cycle.cycle_id),
            description=outcome.description,
        )
        parts.fault("version_created")
    if not parts.registry.is_decided(version):
        parts.registry.set_candidate(version)
    parts.fault("candidate_set")
    parts.tracker.set_tags(outcome.run_id, {"onlinerl.version": str(version)})
    parts.tracker.finish(outcome.run_id, status="FINISHED")
    return version
