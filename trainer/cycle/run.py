"""One cycle: window -> advantages -> segments -> update -> checkpoint -> registered candidate.

    planned ----> trained ------> registered
       |  update     |  upload, register
       +-------------+----------> failed (the data does not allow it, too many attempts at the
                                  update, or another champion since)

A process may die anywhere: the ledger still says `planned` or `trained`, and the next one goes on
with the same window, seed and configuration. Only attempts at the update are counted; uploading
what is trained is repeated until it works. Registering twice is prevented by asking the registry
for the version of this cycle first.
"""

import logging
from datetime import timedelta

from onlinerl.errors import TrainingError
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.trainer.bookkeeping.ledger import Cycle
from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.cycle.outcome import forget_old_outcomes, read_outcome
from onlinerl.trainer.cycle.parts import Parts
from onlinerl.trainer.cycle.register import publish
from onlinerl.trainer.cycle.update import train_cycle
from onlinerl.trainer.rollouts.window import WindowQuery, choose_window, recent_versions

logger = logging.getLogger(__name__)


def run_cycle(parts: Parts, *, lease: Lease) -> Cycle:
    """Finish the cycle that was left unfinished, or plan a new one and finish that.

    Raises:
        TooFewRows: when there is no cycle to finish and not enough to learn from.
        ServiceUnavailable: when the registry or the tables cannot be read; nothing has changed.
        TrainingError: when no update can be computed; the cycle is marked as failed.
        LeaseHeld: when another trainer took the lease since; the cycle is left as it was.
    """
    parts.registry.check()
    parts.ledger.begin(lease=lease)
    cycle = find_unfinished(parts, lease=lease) or parts.ledger.add(plan_cycle(parts), lease=lease)
    logger.info("cycle", extra={"cycle": cycle.cycle_id, "status": cycle.status})
    parts.fault("planned")
    try:
        if cycle.status == "planned":
            _hold(parts, cycle)
            parts.ledger.begin_attempt(cycle, lease=lease)
            train_cycle(parts, cycle)
            parts.ledger.mark_trained(cycle, lease=lease)
            parts.fault("trained")
            if (reason := _reason_outdated(parts, cycle)) is not None:
                raise TrainingError(reason)
    except TrainingError as error:
        parts.ledger.mark_failed(cycle, reason=str(error), lease=lease)
        parts.source.release(cycle.cycle_id)
        raise
    outcome = read_outcome(parts.folder, cycle.cycle_id)
    lease.confirm()
    version = publish(parts, cycle, outcome=outcome)
    parts.ledger.mark_registered(cycle, version=version, baselines=outcome.baselines, lease=lease)
    parts.source.release(cycle.cycle_id)
    forget_old_outcomes(parts.folder, keep=parts.config.keep_cycles)
    return parts.ledger.cycle(cycle.number)


def find_unfinished(parts: Parts, *, lease: Lease) -> Cycle | None:
    """The unfinished cycle; one that cannot be finished is marked as failed, and None returned."""
    cycle = parts.ledger.unfinished(parts.policy)
    if cycle is None:
        return None
    reason = _reason_to_give_up(parts, cycle)
    if reason is None:
        return cycle
    logger.warning("gave up a cycle", extra={"cycle": cycle.cycle_id, "reason": reason})
    parts.ledger.mark_failed(cycle, reason=reason, lease=lease)
    parts.source.release(cycle.cycle_id)
    return None


def _hold(parts: Parts, cycle: Cycle) -> None:
    """Keep the rows of the window readable while the tables are compacted and cleaned.

    Raises:
        TrainingError: rows of the window were erased since it was planned.
    """
    reason = parts.source.hold(cycle.cycle_id, at=cycle.plan.table_versions)
    if reason is not None:
        raise TrainingError(f"the window cannot be read any more: {reason}")


def _reason_to_give_up(parts: Parts, cycle: Cycle) -> str | None:
    if parts.registry.version_of(cycle.cycle_id) is not None:
        return None
    if cycle.status == "planned" and cycle.attempts >= parts.config.max_attempts:
        return f"given up after {cycle.attempts} attempts"
    return _reason_outdated(parts, cycle)


def _reason_outdated(parts: Parts, cycle: Cycle) -> str | None:
    """The reason when another version has become champion since, by promotion or rollback."""
    champion = parts.registry.champion()
    if champion != cycle.plan.parent_version:
        # The rows were chosen as recent for another parent, so their bound on age does not hold.
        return f"the champion is {champion} now, planned for {cycle.plan.parent_version}"
    return None


def plan_cycle(parts: Parts) -> Plan:
    """Choose the window at the newest version of the tables.

    Raises:
        TooFewRows: there is not enough to learn from.
        ServiceUnavailable: the registry or the tables do not answer.
    """
    config, champion, now = parts.config, parts.registry.champion(), parts.now()
    at = parts.source.versions()
    served = parts.source.served_versions(parts.policy, at=at)
    query = WindowQuery(
        policy=parts.policy,
        versions=recent_versions(served, champion=champion, max_lag=config.max_version_lag),
        heldout_fraction=config.heldout_fraction,
        served_after=now - timedelta(seconds=config.max_age_s),
        max_row_tokens=config.max_row_tokens,
        task_tag=config.task_tag,
    )
    candidates = parts.source.candidates(query, trained=parts.ledger.trained_rows(), at=at)
    window = choose_window(candidates, max_rows=config.max_rows, min_rows=config.min_labelled_rows)
    return Plan(
        policy=parts.policy,
        parent_version=champion,
        base_model=parts.base_model,
        table_versions=at,
        rows=window.rows,
        excluded=window.excluded,
        baselines=parts.ledger.baselines(parts.policy),
        seed=config.seed + parts.ledger.count(),
        trainer=config,
        rewards=parts.rewards,
        planned_at=now,
    )
