"""`onlinerl train` and `onlinerl schedule` with their real parts."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from onlinerl.errors import DependencyMissing, ServiceUnavailable
from onlinerl.trainer.assembly import (
    TrainerSettings,
    open_database,
    read_from_snapshot,
    real_parts,
    trainer_lease,
)
from onlinerl.trainer.cycle.run import run_cycle

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)


def run_train(configuration: "Settings", snapshot: str | None = None) -> int:
    """Run one cycle in this process; after a signal the next call repeats its window.

    Args:
        configuration: The configuration.
        snapshot: Name of a snapshot; a new window is then chosen from the rows that it holds.

    Raises:
        LeaseHeld: another trainer works on this policy.
        TooFewRows: there is not enough to learn from.
        ServiceUnavailable: the registry or the tables do not answer.
        TrainingError: no update can be computed from the window.
    """
    _silence_progress_bars()
    settings = trainer_settings(configuration)
    database = open_database(settings.folder)
    with (
        _tell_that_the_window_is_kept(),
        _stopped_by_signals(),
        trainer_lease(settings, database) as lease,
    ):
        parts = real_parts(settings, database)
        if snapshot is not None:
            parts = read_from_snapshot(snapshot, parts, settings)
        cycle = run_cycle(parts, lease=lease)
    logger.info("registered a candidate", extra={"cycle": cycle.cycle_id, "version": cycle.version})
    return 0


def run_schedule(configuration: "Settings") -> int:
    """Run cycles when they are due, until a signal."""
    from onlinerl.trainer.schedule.loop import run

    return run(
        trainer_settings(configuration),
        configuration.schedule,
        configuration=configuration.model_dump_json(indent=1),
    )


def trainer_settings(configuration: "Settings") -> TrainerSettings:
    """The sections of the configuration that training needs."""
    return TrainerSettings(
        policy=configuration.policy,
        registry=configuration.registry,
        rewards=configuration.rewards,
        store=configuration.store,
        store_root=configuration.store_root,
        trainer=configuration.trainer,
        folder=configuration.folder("trainer"),
    )


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
def _tell_that_the_window_is_kept() -> Iterator[None]:
    """Add to an outage's message that nothing is lost by it."""
    try:
        yield
    except ServiceUnavailable as error:
        raise ServiceUnavailable(
            f"{error}; the next cycle repeats this window, if one was chosen"
        ) from error


def _silence_progress_bars() -> None:
    """Switch the progress bars of transformers off: in a job's log they are noise.

    Raises:
        DependencyMissing: the extra `trainer` is not installed.
    """
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise DependencyMissing(f"{error}; install onlinerl[trainer]") from error
    transformers_logging.disable_progress_bar()
