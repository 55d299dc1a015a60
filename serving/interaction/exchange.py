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
    """How a prompt relates to interactions that were logged before."""

    session_id: str
    parent_id: str | None = None
    """Interaction that this one continues; None when it continues none."""
    parent_choice: int = 0
    """Index of the continued choice of that interaction."""
    prefix_length: int = 0
    """Tokens of the parent's prompt and completion that this prompt starts with."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request being answered, and how it is logged."""

    interaction_id: str
    caller: Caller
    consent: Consent
    request: Request
    sampling: Sampling
    """Sampling parameters with the bound on tokens that is really used."""
    grammar: Mapping[str, object] | None = None
    """vLLM's `structured_outputs`, which mask the distribution; None without a grammar."""
    user: str | None
    """Keyed hash of the user."""
    prompt_ids: Sequence[int]
    """The whole prompt."""
    lineage: Lineage
    policy: str
    version: Callable[[], str]
    """Gives the version that answers; it may change until the first token."""
    arm: Arm = "champion"
    arm_probability: float | None = None
    """Probability with which this session was given `arm`."""
    renderer: RendererName
    served_at: datetime
    started: float
    """When the request arrived, of `time.monotonic`."""

    @property
    def policy_version(self) -> str:
        """The version that sampled the first token; before that, the version expected to."""
        return self.version()

    def since_start_ms(self, moment: float | None) -> float | None:
        """Milliseconds from the arrival to `moment` of `time.monotonic`; None for None."""
        return None if moment is None else (moment - self.started) * 1000
