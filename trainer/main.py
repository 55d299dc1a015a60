"""`onlinerl train`: one cycle with its real parts, in this process."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from onlinerl.errors import DependencyMissing, ServiceUnavailable
from onlinerl.trainer.assembly import open_database, reading_from, real_parts, trainer_lease
from onlinerl.trainer.cycle.run import run_cycle

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)


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
        trainer_lease(settings, database) as lease,
    ):
        parts = real_parts(settings, database)
        if snapshot is not None:
            parts = reading_from(snapshot, parts, settings)
        cycle = run_cycle(parts, lease=lease)
    logger.info("registered a candidate", extra={"cycle": cycle.cycle_id, "version": cycle.version})
    return 0


def run_schedule(settings: "Settings") -> int:
    """Run cycles when they are due, until a signal."""
    from onlinerl.trainer.schedule.loop import run

    return run(settings)


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
