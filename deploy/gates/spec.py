"""The input and output of a gate job; controller and job exchange them as JSON files."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from onlinerl.deploy.replicas.fleet import Probe


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class HeldOutAnswer(_Model):
    """A logged answer of a session that is never trained on."""

    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each completion token as served, at `temperature`, nats."""
    temperature: float
    """Sampling temperature, above 0."""
    reward: float | None
    """None when nobody rated the answer."""


class Reference(_Model):
    """The text whose perplexity is measured."""

    text: str
    max_tokens: int
    """Tokens from its start that are scored."""
    window: int
    """Tokens of one forward pass."""


class GateSpec(_Model):
    """What to measure. Without a champion, drift and reward are left out."""

    candidate: Path
    """Checkpoint folder."""
    champion: Path | None
    """Checkpoint folder; None for the first version."""
    base: Path | None
    """Checkpoint folder of version 1; None when its perplexity is known or is the candidate's."""
    answers: list[HeldOutAnswer]
    reference: Reference
    num_probes: int
    """Largest number of token sequences to score for the verification after a swap."""
    probe_tokens: int
    """Tokens of each sequence."""
    threads: int
    """CPU threads; 0 leaves the choice to torch."""


class AnswerScore(_Model):
    """Log-probabilities of one answer, summed over its tokens, at its own temperature."""

    behaviour: float
    """Under the policy that served it, as logged."""
    champion: float
    candidate: float
    reward: float | None


class Measurements(_Model):
    """The output of a gate job."""

    num_nonfinite: int
    """Weights of the candidate that are infinite or not a number."""
    k3: float | None
    """Mean distance from the champion over held-out tokens, nats; None without a champion or
    without answers."""
    num_tokens: int
    """Held-out tokens that `k3` was measured on."""
    answers: list[AnswerScore]
    perplexity: float
    """Perplexity of the reference text under the candidate."""
    base_perplexity: float | None
    """Perplexity under version 1; None when the spec has no `base`."""
    probes: list[Probe]
