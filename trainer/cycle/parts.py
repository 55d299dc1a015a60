"""The parts of a cycle, which tests replace: store, registry, tracker, backend, clock."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.trainer.backend.protocol import TrainingBackend
from onlinerl.trainer.bookkeeping.ledger import Ledger
from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.registry.protocol import ModelRegistry
from onlinerl.trainer.rollouts.source import RolloutSource
from onlinerl.trainer.tracking.protocol import RunTracker
from onlinerl.trainer.training.loop import History, OnStep

FAULTS = (
    "planned",
    "parent_fetched",
    "first_step",
    "outcome_written",
    "trained",
    "uploaded",
    "version_created",
    "candidate_set",
)
"""Points of a cycle at which tests end the process."""


class OpenBackend(Protocol):
    """Loads the weights of the parent version."""

    def __call__(self, parent: Path, *, plan: Plan) -> TrainingBackend:
        """A backend for the plan."""
        ...


class DrawFigures(Protocol):
    """Draws the figures of a cycle."""

    def __call__(self, folder: Path, *, plan: Plan, history: History, title: str) -> None:
        """Create the folder and write the figures."""
        ...


def no_progress(num_steps: int) -> OnStep:
    """Progress that is not shown."""
    return lambda number, metrics: None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a cycle."""

    policy: str
    base_model: str
    config: TrainerConfig
    rewards: RewardsConfig
    folder: Path
    """Local files of the trainer: cycles, downloaded versions."""
    ledger: Ledger
    source: RolloutSource
    registry: ModelRegistry
    tracker: RunTracker
    open_backend: OpenBackend
    draw_figures: DrawFigures
    progress: Callable[[int], OnStep] = no_progress
    """Takes the number of planned steps; the result is called after each step."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    fault: Callable[[str], None] = lambda point: None
