"""What a gate job is asked and what it answers; JSON files between controller and job."""

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
    """As served, at `temperature`."""
    temperature: float
    reward: float | None


class Reference(_Model):
    """The text whose perplexity is measured."""

    text: str
    max_tokens: int
    window: int


class GateSpec(_Model):
    """Measure `candidate`; without a champion only what needs none."""

    candidate: Path
    """Checkpoint folder."""
    champion: Path | None
    base: Path | None
    """Checkpoint of version 1, when its perplexity is not known yet."""
    answers: list[HeldOutAnswer]
    reference: Reference
    num_probes: int
    probe_tokens: int
    threads: int


class AnswerScore(_Model):
    """Log-probabilities of one answer, summed over its tokens, at its own temperature."""

    behaviour: float
    champion: float
    candidate: float
    reward: float | None


class Measurements(_Model):
    """What the job found."""

    num_nonfinite: int
    k3: float | None
    """Mean over held-out tokens; None without a champion or without answers."""
    num_tokens: int
    answers: list[AnswerScore]
    perplexity: float
    base_perplexity: float | None
    """Only when it was asked for."""
    probes: list[Probe]
