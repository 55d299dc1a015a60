"""`onlinerl schedule`: checks at an interval whether a cycle is due, and runs it in a process.

APScheduler is only the clock. What is due comes from the ledger, overlap is prevented by the lease
and by `max_instances`, and the schedule holds no state that a restart would lose.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from onlinerl.errors import OnlineRLError, TooFewRows
from onlinerl.process.fault_streak import FaultStreak
from onlinerl.process.files import replace_file
from onlinerl.trainer.assembly import TrainerSettings, open_database, real_parts, trainer_lease
from onlinerl.trainer.config import ScheduleConfig
from onlinerl.trainer.cycle.parts import Parts
from onlinerl.trainer.cycle.run import plan_cycle
from onlinerl.trainer.schedule.child import job_command, run_child
from onlinerl.trainer.schedule.due import Intervals, seconds_until_due
from onlinerl.trainer.schedule.exit_codes import EXIT_LEASE_HELD, EXIT_NOTHING_TO_DO
from onlinerl.trainer.schedule.metrics import CYCLE_SECONDS, CYCLES, DUE_IN, TICK, TICK_FAULTS

logger = logging.getLogger(__name__)

LATE_TICKS, LATE_S = 4, 60.0
"""The schedule is unready when neither this many ticks nor this many seconds show a sign of it."""


@dataclass
class Activity:
    """What the ticking thread does."""

    seen_at: float
    """When it last gave a sign of life, seconds since 1970."""
    waiting_for: str = "the first look"


class Schedule:
    """Decides on every tick; `run_job` runs one training process and returns its exit code."""

    def __init__(
        self,
        parts: Parts,
        *,
        config: ScheduleConfig,
        run_job: Callable[[Callable[[], None]], int],
        lease_held_by: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._parts = parts
        self._lease_held_by = lease_held_by
        self._config = config
        self._run_job = run_job
        self._clock = clock
        self._last_attempt_at: float | None = None
        self._faults = FaultStreak()
        self._next_look_at = 0.0
        self.activity = Activity(seen_at=clock())

    def tick(self) -> None:
        """Run a cycle if one is due and possible. Never raises: the clock must go on.

        While it fails, most ticks do nothing, so that the pause between two attempts doubles.
        """
        self._report_alive()
        if self._clock() < self._next_look_at:
            return
        TICK.set(self._clock())
        try:
            reason = self._reason_to_wait()
            self._faults.clear()
            if reason is None:
                self._train()
            else:
                self.activity.waiting_for = reason
        except OnlineRLError as error:
            if self._count_fault(str(error)):
                logger.warning("cannot look for a cycle: %s", error)
        except Exception:
            self._count_fault("an unexpected error, see the log")
            logger.exception("a tick failed")

    def ready(self) -> str | None:
        """Why the schedule is not well; None when it is."""
        silent_s = self._clock() - self.activity.seen_at
        if silent_s > max(LATE_S, LATE_TICKS * self._config.check_every_s):
            return f"the last look was {silent_s:.0f} s ago"
        return self._faults.trouble

    def _count_fault(self, reason: str) -> bool:
        """Count a look that failed; True when the look before it did not fail in the same way."""
        TICK_FAULTS.inc()
        is_new = self._faults.add(reason)
        interval_s = self._config.check_every_s
        # Half an interval less, so that the tick of that time is not skipped for being early.
        wait_s = self._faults.wait_s(interval_s) - interval_s / 2
        self._next_look_at = self._clock() + wait_s
        return is_new

    def _reason_to_wait(self) -> str | None:
        ledger, policy = self._parts.ledger, self._parts.policy
        unfinished = ledger.unfinished(policy)
        wait_s = seconds_until_due(
            self._clock(),
            intervals=Intervals(
                interval_s=self._config.interval_s, retry_after_s=self._config.retry_after_s
            ),
            last=ledger.last_finished(policy),
            is_unfinished=unfinished is not None,
            last_attempt_at=self._last_attempt_at,
        )
        DUE_IN.set(wait_s)
        if wait_s > 0:
            return f"the next cycle is due in {wait_s:.0f} s"
        held_by = self._lease_held_by()
        if held_by is not None:  # e.g. by `onlinerl train`; a process would only find that out
            return held_by
        self._parts.registry.check()
        if unfinished is not None:
            return None
        undecided = self._parts.registry.undecided() if self._config.wait_for_verdict else None
        if undecided is not None:
            return f"version {undecided} waits for its verdict"
        return self._too_few_rows()

    def _too_few_rows(self) -> str | None:
        """Plan without recording the plan: cheaper than a process that finds nothing to do."""
        try:
            plan_cycle(self._parts)
        except TooFewRows as error:
            return str(error)
        return None

    def _train(self) -> None:
        self.activity.waiting_for = "a training process"
        started = self._clock()
        before = self._parts.ledger.last_finished(self._parts.policy)
        code = self._run_job(self._report_alive)
        after = self._parts.ledger.last_finished(self._parts.policy)
        is_registered = after is not None and after != before and after.status == "registered"
        if is_registered:
            CYCLE_SECONDS.set(self._clock() - started)
        else:
            self._last_attempt_at = self._clock()
        CYCLES.labels(outcome="registered" if is_registered else _outcome(code)).inc()
        logger.info(
            "training process ended", extra={"exit_code": code, "registered": is_registered}
        )

    def _report_alive(self) -> None:
        self.activity.seen_at = self._clock()


def _outcome(code: int) -> str:
    """How a training process ended that registered nothing."""
    if code == EXIT_NOTHING_TO_DO:
        return "nothing_to_do"
    if code == EXIT_LEASE_HELD:
        return "lease_held"
    # A signal that asks it to end makes it exit with 0, or is not handled yet.
    return "stopped" if code in (0, -signal.SIGTERM) else "failed"


def run(settings: TrainerSettings, config: ScheduleConfig, *, configuration: str) -> int:
    """Run until SIGTERM or SIGINT; a training process that runs then is ended and repeated later.

    Args:
        settings: What training needs.
        config: When cycles run.
        configuration: The whole configuration as JSON, for the training processes.
    """
    from apscheduler.schedulers.blocking import BlockingScheduler

    from onlinerl.process.health import HealthServer

    stop = threading.Event()
    database = open_database(settings.folder)
    parts = real_parts(settings, database)
    lease = trainer_lease(settings, database)

    def lease_held_by() -> str | None:
        holder = lease.holder()
        return holder and f"the lease {lease.name!r} is held by {holder}"

    schedule = Schedule(
        parts,
        config=config,
        run_job=_job(write_configuration(settings.folder, configuration), config, stop=stop),
        lease_held_by=lease_held_by,
    )
    clock = BlockingScheduler(timezone=UTC)
    clock.add_job(
        schedule.tick,
        "interval",
        seconds=config.check_every_s,
        next_run_time=datetime.now(UTC),
        coalesce=True,
        max_instances=1,
        misfire_grace_time=None,
    )

    def end(number: int, frame: object) -> None:
        stop.set()
        # Not from the handler's own thread: shutting down waits for the tick that runs.
        threading.Thread(target=clock.shutdown, name="shutdown").start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with HealthServer(config.health_host, config.health_port, ready=schedule.ready):
        logger.info("schedule started", extra={"interval_s": config.interval_s})
        clock.start()
    return 0


def write_configuration(folder: Path, configuration: str) -> Path:
    """The file that training processes read; for its owner alone: it may hold a storage's keys."""
    file = folder / "schedule-settings.json"
    replace_file(file, configuration, private=True)
    return file


def _job(
    settings_file: Path, config: ScheduleConfig, *, stop: threading.Event
) -> Callable[[Callable[[], None]], int]:
    def run_job(alive: Callable[[], None]) -> int:
        return run_child(
            job_command(settings_file),
            timeout_s=config.cycle_timeout_s,
            grace_s=config.stop_grace_s,
            stop=stop,
            alive=alive,
        )

    return run_job
