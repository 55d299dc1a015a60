"""What a cycle works with: every outside thing as an argument."""

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
    """Loads the parent's weights."""

    def __call__(self, parent: Path, *, plan: Plan) -> TrainingBackend:
        """A backend for the plan."""
        ...


class DrawFigures(Protocol):
    """Draws what a reviewer looks at into a folder."""

    def __call__(self, folder: Path, *, plan: Plan, history: History, title: str) -> None:
        """Create the folder and write the figures."""
        ...


def no_progress(num_steps: int) -> OnStep:
    """For a cycle that nobody watches."""
    return lambda number, metrics: None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a cycle works with."""

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
    """Given the number of planned steps, is told of each one."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    fault: Callable[[str], None] = lambda point: None
