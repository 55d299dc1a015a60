"""One admitted request: everything about it that is known before the first token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from onlinerl.rollout_store.schema import (
    Arm,
    Completion,
    Consent,
    InteractionEvent,
    Renderer,
    Sampling,
)
from onlinerl.serving.auth import Caller
from onlinerl.serving.capture import untrainable_reason
from onlinerl.serving.request import Request


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
    renderer: Renderer
    served_at: datetime
    started: float
    """`time.monotonic` of the arrival."""

    @property
    def policy_version(self) -> str:
        """What sampled the first token; until the engine told, what the pool knew to serve."""
        return self.version()

    def event(
        self,
        choices: Sequence[Completion],
        *,
        first_token_at: float | None,
        last_token_at: float | None,
    ) -> InteractionEvent:
        """The logged form of this request with what was sampled for it."""
        reason = untrainable_reason(
            choices,
            policy=self.policy,
            sampling=self.sampling,
            constrained=self.grammar is not None,
            arm=self.arm,
        )
        return InteractionEvent(
            interaction_id=self.interaction_id,
            session_id=self.lineage.session_id,
            parent_id=self.lineage.parent_id,
            parent_choice=self.lineage.parent_choice,
            prefix_length=self.lineage.prefix_length,
            prompt_token_ids=list(self.prompt_ids[self.lineage.prefix_length :]),
            policy=self.policy,
            arm=self.arm,
            arm_probability=self.arm_probability,
            protocol=self.request.protocol,
            streamed=self.request.stream,
            sampling=self.sampling,
            renderer=self.renderer,
            tenant=self.caller.tenant,
            user=self.user,
            consent=self.consent,
            trainable=reason is None,
            untrainable_reason=reason,
            served_at=self.served_at,
            ttft_ms=self._since_start_ms(first_token_at),
            latency_ms=self._since_start_ms(last_token_at),
            tags=dict(self.request.tags),
            choices=list(choices),
        )

    def _since_start_ms(self, moment: float | None) -> float | None:
        return None if moment is None else (moment - self.started) * 1000
