"""`onlinerl schedule`: looks at an interval whether a cycle is due, and runs it in a process.

APScheduler is only the clock. What is due comes from the ledger, overlap is prevented by the lease
and by `max_instances`, and the schedule holds no state that a restart would lose.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl.errors import OnlineRLError, TooFewRows
from onlinerl.trainer.assembly import open_database, real_parts, trainer_lease
from onlinerl.trainer.config import ScheduleConfig
from onlinerl.trainer.cycle.parts import Parts
from onlinerl.trainer.cycle.run import plan_cycle
from onlinerl.trainer.schedule.child import job_command, run_child
from onlinerl.trainer.schedule.due import Intervals, seconds_until_due
from onlinerl.trainer.schedule.exit_codes import EXIT_LEASE_HELD, EXIT_NOTHING_TO_DO
from onlinerl.trainer.schedule.metrics import CYCLE_SECONDS, CYCLES, DUE_IN, TICK

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

LATE_TICKS, LATE_S = 4, 60.0
"""Ticks, and seconds, that may pass in silence before the schedule says that it is not well."""


@dataclass
class Pulse:
    """When the ticking thread last showed itself, and what it waits for."""

    seen_at: float
    waiting_for: str = "the first look"
    trouble: str | None = None


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
        self.pulse = Pulse(seen_at=clock())

    def tick(self) -> None:
        """Run a cycle if one is due and possible. Never raises: the clock must go on."""
        self._show()
        TICK.set(self._clock())
        try:
            reason = self._reason_to_wait()
            self.pulse.trouble = None
            if reason is None:
                self._train()
            else:
                self.pulse.waiting_for = reason
        except OnlineRLError as error:
            if self.pulse.trouble != str(error):  # said once, not at every look
                logger.warning("cannot look for a cycle: %s", error)
            self.pulse.trouble = str(error)
        except Exception:
            self.pulse.trouble = "an unexpected error, see the log"
            logger.exception("a tick failed")

    def ready(self) -> str | None:
        """Why the schedule is not well; None when it is."""
        silent_s = self._clock() - self.pulse.seen_at
        if silent_s > max(LATE_S, LATE_TICKS * self._config.check_every_s):
            return f"the last look was {silent_s:.0f} s ago"
        return self.pulse.trouble

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
        """Planned here without being recorded: cheaper than a process that finds nothing."""
        try:
            plan_cycle(self._parts)
        except TooFewRows as error:
            return str(error)
        return None

    def _train(self) -> None:
        self.pulse.waiting_for = "a training process"
        started = self._clock()
        before = self._parts.ledger.last_finished(self._parts.policy)
        code = self._run_job(self._show)
        after = self._parts.ledger.last_finished(self._parts.policy)
        registered = after is not None and after != before and after.status == "registered"
        if registered:
            CYCLE_SECONDS.set(self._clock() - started)
        else:
            self._last_attempt_at = self._clock()
        CYCLES.labels(outcome="registered" if registered else _outcome(code)).inc()
        logger.info("training process ended", extra={"exit_code": code, "registered": registered})

    def _show(self) -> None:
        self.pulse.seen_at = self._clock()


def _outcome(code: int) -> str:
    """How a training process ended that registered nothing."""
    if code == EXIT_NOTHING_TO_DO:
        return "nothing_to_do"
    if code == EXIT_LEASE_HELD:
        return "lease_held"
    # A signal that asks it to end makes it exit with 0, or is not handled yet.
    return "stopped" if code in (0, -signal.SIGTERM) else "failed"


def run(settings: "Settings") -> int:
    """Until SIGTERM or SIGINT; a training process that runs then is ended and repeated later."""
    from apscheduler.schedulers.blocking import BlockingScheduler

    from onlinerl.process.health import HealthServer

    config, stop = settings.schedule, threading.Event()
    database = open_database(settings)
    parts = real_parts(settings, database)
    settings_file = settings.folder("trainer") / "schedule-settings.json"
    write_private(settings_file, settings.model_dump_json(indent=1))
    lease = trainer_lease(settings, database)

    def lease_held_by() -> str | None:
        holder = lease.holder()
        return holder and f"the lease {lease.name!r} is held by {holder}"

    schedule = Schedule(
        parts,
        config=config,
        run_job=_job(settings_file, config, stop=stop),
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


def write_private(file: Path, text: str) -> None:
    """For its owner alone, whatever was there before: settings may hold keys of a storage."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)


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
