"""One admitted request: everything about it that is known before the first token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from onlinerl.rollout_store.schema import (
    Arm,
    Consent,
    RendererName,
    Sampling,
)
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.interaction.request import Request


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """How a prompt hangs together with what was logged before."""

    session_id: str
    parent_id: str | None = None
    parent_choice: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request on its way, and how it is logged."""

    interaction_id: str
    caller: Caller
    consent: Consent
    request: Request
    sampling: Sampling
    """With the bound on tokens that was really used."""
    grammar: Mapping[str, object] | None = None
    """vLLM's `structured_outputs`, which mask the distribution."""
    user: str | None
    """Keyed hash."""
    prompt_ids: Sequence[int]
    """The whole prompt."""
    lineage: Lineage
    policy: str
    version: Callable[[], str]
    """Tells what answers; it changes while another replica may still take the request over."""
    arm: Arm = "champion"
    arm_probability: float | None = None
    """Probability with which this session was given `arm`."""
    renderer: RendererName
    served_at: datetime
    started: float
    """`time.monotonic` of the arrival."""

    @property
    def policy_version(self) -> str:
        """What sampled the first token; until the engine told, what the pool knew to serve."""
        return self.version()

    def since_start_ms(self, moment: float | None) -> float | None:
        """Milliseconds from the arrival to `moment`, a reading of `time.monotonic`."""
        return None if moment is None else (moment - self.started) * 1000
