"""Configuration of the deploy controller and its gates. Imports nothing heavy."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from onlinerl.base_config import Config


class DriftGateConfig(Config):
    """How far the candidate is from the champion, on held-out logged answers."""

    enabled: bool = True
    """Whether the gate is measured; a disabled gate is recorded as skipped."""

    max_k3: float = Field(default=0.1, gt=0)
    """Largest mean of r - log r - 1 over tokens, in nats; r is the ratio of the probabilities under
    candidate and champion."""

    min_tokens: int = Field(default=200, ge=1)
    """Number of held-out tokens below which the evidence is too little. The gate is then skipped,
    and a person must approve the candidate whatever `deploy.review` says."""


class RewardGateConfig(Config):
    """The reward of the candidate, estimated from logs, compared with that of the champion."""

    enabled: bool = True
    """Whether the gate is measured; a disabled gate is recorded as skipped."""

    margin: float = Field(default=0.05, ge=0)
    """Reward that may be lost; the gate fails when the upper bound of the difference is below
    -margin."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Two-sided confidence level of the interval around the estimated difference."""

    max_weight: float = Field(default=10.0, gt=1)
    """Largest importance weight of one answer; larger ones are clipped."""

    min_ess: float = Field(default=30.0, ge=1)
    """Effective number of answers below which the evidence is too little. The gate is then
    skipped, which does not stop the candidate."""

    min_ess_fraction: float = Field(default=0.3, ge=0, le=1)
    """Effective share of answers below which the evidence is too little."""


class PerplexityGateConfig(Config):
    """General language ability: perplexity on a reference text, relative to version 1."""

    enabled: bool = True
    """Whether the gate is measured; a disabled gate is recorded as skipped."""

    reference: Path | None = None
    """UTF-8 text file; the text in the package when absent."""

    max_ratio: float = Field(default=1.2, gt=0)
    """Largest perplexity of the candidate divided by that of version 1."""

    max_tokens: int = Field(default=4096, ge=32)
    """Number of tokens of the reference that are scored."""

    window: int = Field(default=512, ge=16)
    """Tokens per forward pass; the text is cut into pieces of this length."""


class GatesConfig(Config):
    """The gates that a candidate must pass before it may be promoted, and their evidence."""

    drift: DriftGateConfig = DriftGateConfig()
    """Distance from the champion."""

    reward: RewardGateConfig = RewardGateConfig()
    """Estimated reward."""

    perplexity: PerplexityGateConfig = PerplexityGateConfig()
    """General language ability."""

    max_rows: int = Field(default=256, ge=1)
    """Largest number of held-out answers that are scored, newest first."""

    max_age_s: float = Field(default=7 * 86_400.0, gt=0)
    """Largest age of a held-out answer in seconds; older ones are left out."""

    snapshot: str = Field(default="", max_length=128)
    """Name of a snapshot whose held-out answers are scored, so that every candidate is measured on
    the same rows; the current tables when empty."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of the gate job; 0 leaves the choice to torch."""

    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest run of a gate job in seconds; after it the job is stopped and the candidate is not
    promoted."""


class ProbeConfig(Config):
    """The proof after a swap: logprobs of the engine against transformers on the same weights."""

    max_mean_abs_diff: float = Field(default=0.01, gt=0)
    """Largest mean absolute difference of token logprobs, in nats. With the right weights an engine
    that computes in float32 stays below 0.0001, and one in bfloat16 reaches 0.01 to 0.05."""

    num_sequences: int = Field(default=4, ge=1)
    """Number of token sequences that are scored."""

    max_tokens: int = Field(default=64, ge=8)
    """Length of one sequence in tokens."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for one request to the engine, in seconds."""


class DeployConfig(Config):
    """The controller that judges, promotes, proves and rolls back versions."""

    poll_s: float = Field(default=5.0, gt=0)
    """Seconds between two checks of the registry and the replicas."""

    review: Literal["auto", "required"] = "auto"
    """`required`: every candidate that passed waits for the tag `review = approved` or for
    `onlinerl promote`. `auto`: only a candidate that the drift gate skipped, for lack of held-out
    answers, waits."""

    gates: GatesConfig = GatesConfig()
    """The gates before a promotion."""

    probe: ProbeConfig = ProbeConfig()
    """The proof after a swap."""

    anchor_every: int = Field(default=10, ge=1)
    """Number of deltas between two anchors, which are full sets of weights."""

    health_port: int = Field(default=9103, ge=0, le=65535)
    """Port of `/health/live`, `/health/ready` and `/metrics`; 0 switches them off."""

    stage_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time, in seconds, to fetch, verify and decode weights on a replica."""

    commit_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time, in seconds, of one call of the swap, and of the whole pause."""

    request_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for any other request to a replica, in seconds."""

    command_timeout_s: float = Field(default=900.0, gt=0)
    """Longest wait of `onlinerl promote` and `rollback` for the controller, in seconds."""

    max_attempts: int = Field(default=3, ge=1)
    """Number of failed swaps after which a version is given up."""

    pause_warning_ms: float = Field(default=1000.0, gt=0)
    """Pause of a replica, in milliseconds, above which a swap is logged as a warning."""
