"""The decisions that a cycle makes once, so that its repeat after a crash does the same."""

from pydantic import AwareDatetime, BaseModel, ConfigDict

from onlinerl.rollout_store.config import RewardsConfig
from onlinerl.trainer.config import TrainerConfig
from onlinerl.trainer.rollouts.rows import RowKey, WindowRow


class Plan(BaseModel):
    """The window of a cycle and the configuration of its update."""

    model_config = ConfigDict(frozen=True)

    policy: str
    parent_version: int
    """Registry version whose weights the cycle starts from: the champion when it was planned."""
    base_model: str
    """The model that the KL penalty is measured against."""
    table_versions: dict[str, int]
    """Versions of the tables at which the rows were chosen and are read."""
    rows: tuple[WindowRow, ...]
    excluded: dict[str, int]
    """Completions that are not in the window, counted by reason."""
    baselines: dict[str, float]
    """Exponential mean reward by tenant, from the cycle before."""
    seed: int
    trainer: TrainerConfig
    rewards: RewardsConfig
    planned_at: AwareDatetime

    @property
    def keys(self) -> list[RowKey]:
        """Identities of the rows."""
        return [row.key for row in self.rows]
