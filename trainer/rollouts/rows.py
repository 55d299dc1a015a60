"""A row of a window: one labelled completion, without its tokens."""

from datetime import datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

RowKey = tuple[str, int]
"""interaction_id and choice_index."""


class WindowRow(BaseModel):
    """One labelled completion of a window; the plan keeps it, so that a repeat learns the same."""

    model_config = ConfigDict(frozen=True)

    interaction_id: str
    choice_index: int
    session_id: str
    tenant: str
    task: str | None = None
    """Value of the task tag; rows of a tenant with the same value form a group."""
    reward: float
    weight: float = Field(default=1.0, ge=0, le=1)
    """Share of the row's influence after the reward specification's cap on users; 1 without one."""
    version: int
    """Policy version of the last sampled token."""
    temperature: float
    num_sampled: int
    """Completion tokens."""
    served_at: AwareDatetime

    @property
    def key(self) -> RowKey:
        """Identity of the row."""
        return (self.interaction_id, self.choice_index)

    @property
    def session(self) -> tuple[str, str]:
        """Identity of the session: callers choose session ids, so two tenants may use the same."""
        return (self.tenant, self.session_id)


def served_range(rows: list[WindowRow]) -> tuple[datetime, datetime]:
    """When the first and the last row of a window were served; `rows` is not empty."""
    times = [row.served_at for row in rows]
    return min(times), max(times)
