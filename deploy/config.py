"""Configuration of the deploy controller and its gates. Imports nothing heavy."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from onlinerl.base_config import Config


class DriftGateConfig(Config):
    """Bound on how far the candidate may be from the champion, on held-out logged answers."""

    enabled: bool = True
    """False records the gate as skipped."""

    max_k3: float = Field(default=0.1, gt=0)
    """Bound on the mean over tokens of r - log r - 1, nats; r is the probability of a token under
    the candidate divided by that under the champion."""

    min_tokens: int = Field(default=200, ge=1)
    """With fewer held-out tokens there is not enough evidence: the gate is skipped, and the
    candidate waits for a person, whatever `deploy.review` is."""


class RewardGateConfig(Config):
    """The reward of the candidate, estimated from logs, compared with the champion's."""

    enabled: bool = True
    """False records the gate as skipped."""

    margin: float = Field(default=0.05, ge=0)
    """Reward that may be lost: the gate fails only when the upper end of the interval around the
    estimated difference is below -margin."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Two-sided level of the interval around the estimated difference."""

    max_weight: float = Field(default=10.0, gt=1)
    """Bound on the importance weight of one answer; larger ones are clipped."""

    min_ess: float = Field(default=30.0, ge=1)
    """Effective number of answers below which there is not enough evidence: the gate is skipped,
    which does not stop the candidate."""

    min_ess_fraction: float = Field(default=0.3, ge=0, le=1)
    """Effective share of rated answers below which there is not enough evidence."""


class PerplexityGateConfig(Config):
    """General language ability: perplexity of a reference text, relative to version 1."""

    enabled: bool = True
    """False records the gate as skipped."""

    reference: Path | None = None
    """UTF-8 text file to measure on; without it, the text that comes with the package."""

    max_ratio: float = Field(default=1.2, gt=0)
    """Bound on perplexity of the candidate divided by that of version 1."""

    max_tokens: int = Field(default=4096, ge=32)
    """Tokens of the reference that are scored."""

    window: int = Field(default=512, ge=16)
    """Tokens of one forward pass; the text is cut into such pieces."""


class GatesConfig(Config):
    """The gates that a candidate must pass before it may be promoted."""

    drift: DriftGateConfig = DriftGateConfig()
    """Distance from the champion."""

    reward: RewardGateConfig = RewardGateConfig()
    """Estimated reward."""

    perplexity: PerplexityGateConfig = PerplexityGateConfig()
    """General language ability."""

    max_rows: int = Field(default=256, ge=1)
    """Held-out answers that are scored, newest first."""

    max_age_s: float = Field(default=7 * 86_400.0, gt=0)
    """Held-out answers that are older are left out, seconds."""

    snapshot: str = Field(default="", max_length=128)
    """Name of a snapshot. Its held-out answers are scored as of its creation, so that every
    candidate is measured on the same rows. When empty, the current tables are used."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of the gate job; 0 leaves the choice to torch."""

    timeout_s: float = Field(default=1800.0, gt=0)
    """A gate job that runs longer is stopped, and counts as a failed attempt; seconds."""


class ProbeConfig(Config):
    """Verification after a swap: logprobs of the engine against transformers on the new weights."""

    max_mean_abs_diff: float = Field(default=0.01, gt=0)
    """Bound on the mean absolute difference of token logprobs, nats. An engine that computes in
    float32 stays below 0.0001; one in bfloat16 reaches 0.01 to 0.05 with the right weights."""

    num_sequences: int = Field(default=4, ge=1)
    """Number of token sequences that are scored."""

    max_tokens: int = Field(default=64, ge=8)
    """Tokens of one sequence."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Bound on scoring one sequence in an engine, seconds."""


class DeployConfig(Config):
    """The controller that measures, promotes and rolls back versions."""

    poll_s: float = Field(default=5.0, gt=0)
    """Time between two passes over the registry and the engines, seconds. It doubles with each
    pass that fails, up to 30 s."""

    review: Literal["auto", "required"] = "auto"
    """`required`: every candidate that passed its gates waits for the tag `review = approved` or
    for `onlinerl promote`. `auto`: only a candidate waits whose drift could not be measured for
    lack of held-out answers."""

    gates: GatesConfig = GatesConfig()
    """Measurements before a promotion."""

    probe: ProbeConfig = ProbeConfig()
    """Measurements after a swap."""

    anchor_every: int = Field(default=10, ge=1)
    """Deltas between two full sets of weights."""

    health_port: int = Field(default=9103, ge=0, le=65535)
    """Port of `/health/live`, `/health/ready` and `/metrics`; 0 switches them off."""

    stage_timeout_s: float = Field(default=600.0, gt=0)
    """Bound on fetching, verifying and decoding weights on an engine, seconds."""

    commit_timeout_s: float = Field(default=120.0, gt=0)
    """Bound on each call to an engine during a swap, seconds."""

    request_timeout_s: float = Field(default=10.0, gt=0)
    """Bound on any other request to an engine, seconds."""

    command_timeout_s: float = Field(default=900.0, gt=0)
    """How long `onlinerl promote` and `rollback` wait for the controller, seconds."""

    lease_ttl_s: float = Field(default=300.0, ge=1, le=3600)
    """Seconds after which a controller on another machine may take over from one that was not
    heard of."""

    max_attempts: int = Field(default=3, ge=1)
    """Failed attempts to measure or swap in a version before it is given up."""

    pause_warning_ms: float = Field(default=1000.0, gt=0)
    """A swap that pauses an engine for longer is logged as a warning, milliseconds."""
