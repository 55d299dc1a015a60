"""Configuration of the trainer and its schedule. Must not import torch."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from onlinerl.base_config import Config

LossName = Literal["importance_sampling", "tis", "icepop", "ppo", "cispo", "gspo", "dppo"]
FilterName = Literal["k3", "veto", "geometric"]


class TrainerConfig(Config):
    """One cycle: the rows that it reads, the correction for their age, and its optimizer steps."""

    loss: LossName = "tis"
    """Policy loss per token; `trainer/losses/policy.py` has each formula and its source."""

    ratio_cap: float = Field(default=2.0, ge=1, le=100)
    """Upper bound on the importance ratio in `tis`."""

    ratio_low: float | None = Field(default=None, ge=0, le=1)
    """Lower bound on the ratio in `icepop`, `ppo`, `cispo` and `gspo`; the published default when
    absent."""

    ratio_high: float | None = Field(default=None, ge=1, le=100)
    """Upper bound on the ratio in `icepop`, `ppo`, `cispo` and `gspo`; the published default when
    absent."""

    filters: tuple[FilterName, ...] = ("k3", "veto")
    """Filters on rows (one completion each). A row that fails one adds nothing to the loss."""

    k3_max: float = Field(default=0.01, gt=0, le=10)
    """Filter `k3`: largest mean of r - log r - 1 over the tokens of a row, in nats."""

    veto_ratio: float = Field(default=1e-5, gt=0, lt=1)
    """Filter `veto`: smallest ratio that a token of a row may have."""

    geometric_band: float = Field(default=0.01, gt=0, lt=1)
    """Filter `geometric`: largest distance of exp(mean log r) of a row from 1."""

    kl_coef: float = Field(default=0.05, ge=0, le=10)
    """Weight of the exact KL to the base model per sampled token; with 0 the base is not loaded."""

    learning_rate: float = Field(default=2e-5, gt=0, le=1)
    """Learning rate of AdamW after warm-up."""

    warmup_steps: int = Field(default=0, ge=0, le=10_000)
    """Optimizer steps over which the learning rate rises linearly."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay of AdamW."""

    grad_clip: float = Field(default=1.0, gt=0, le=1e6)
    """Largest global gradient norm of a step; larger gradients are scaled down."""

    tokens_per_step: int = Field(default=4096, ge=1, le=100_000_000)
    """Target number of sampled tokens per optimizer step; a window is split evenly into steps."""

    epochs: int = Field(default=1, ge=1, le=20)
    """Number of passes over the window."""

    micro_batch_tokens: int = Field(default=1024, ge=16, le=10_000_000)
    """Tokens per forward pass, padding included. It bounds the memory of activations: about 2 GiB
    per 1024 tokens for a model of 135 M parameters."""

    max_row_tokens: int = Field(default=4096, ge=8, le=10_000_000)
    """Largest number of tokens of prompt and completion; longer rows are left out and counted."""

    stop_k3: float = Field(default=0.05, gt=0, le=100)
    """Mean k3 of a step, in nats per token, above which the cycle stops before the step."""

    stop_ess: float = Field(default=0.3, ge=0, lt=1)
    """Effective share of the tokens of a step (ESS/n) below which the cycle stops before it."""

    max_engine_gap: float = Field(default=0.1, gt=0, le=100)
    """Largest mean |log r|, in nats, of rows that the parent version served, before the first step.
    The cycle fails above it, because engine and trainer then do not hold the same weights."""

    adapter: Literal["none", "lora"] = "none"
    """`none` trains the weights themselves; `lora` trains an adapter, merged when it is saved."""

    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank of the adapter matrices."""

    lora_alpha: float = Field(default=32.0, gt=0, le=4096)
    """Scale of the adapter: its output is multiplied by alpha / rank."""

    lora_targets: tuple[str, ...] = ("all-linear",)
    """Endings of the names of modules that get an adapter; `all-linear` means every linear module
    but the head."""

    trainable: str = ".*"
    """Regular expression, searched in the names of parameters: those trained without an adapter."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass; `auto` is float32 on a CPU and bfloat16 on a GPU."""

    device: str = Field(default="auto", min_length=1)
    """Device of torch; `auto` takes a GPU when there is one."""

    num_threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of torch; 0 leaves the choice to torch."""

    seed: int = Field(default=0, ge=0)
    """Seed for the order of rows and the first values of adapters; each cycle adds its number."""

    max_rows: int = Field(default=512, ge=1, le=10_000_000)
    """Largest number of completions in a window; the newest are taken."""

    min_labelled_rows: int = Field(default=64, ge=1, le=10_000_000)
    """Smallest number of labelled rows that a cycle starts on."""

    max_version_lag: int = Field(default=2, ge=0, le=100)
    """Largest number of promotions between the version that served a row and now."""

    max_age_s: float = Field(default=7 * 86_400.0, gt=0)
    """Largest age of a row in seconds; older rows are left out."""

    heldout_fraction: float = Field(default=0.15, ge=0, le=0.9)
    """Share of sessions that no cycle reads, because the deploy gates judge candidates on them."""

    baseline_decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay, per session, of the exponential mean of a tenant's reward."""

    task_tag: str = "task"
    """Name of a tag; rows with the same value of it form a group with a leave-one-out baseline."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    """Attempts at a cycle whose update dies; after them it is given up and its rows are free."""

    lease_ttl_s: float = Field(default=60.0, ge=1, le=3600)
    """Seconds of silence after which another process may take over the lease of a holder."""

    hold_s: float = Field(default=86_400.0, ge=60, le=30 * 86_400)
    """Seconds for which the rows of a window are kept readable for its cycle, counted from the
    start of each attempt."""

    keep_cycles: int = Field(default=3, ge=1, le=1000)
    """Number of finished cycles whose checkpoint folder is kept on disk."""

    registry_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Longest wait, in seconds, for the registry at the start of a cycle."""

    @field_validator("trainable")
    @classmethod
    def _trainable_is_a_regular_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _window_can_reach_the_minimum(self) -> Self:
        if self.min_labelled_rows > self.max_rows:
            raise ValueError(
                f"min_labelled_rows ({self.min_labelled_rows}) must not exceed "
                f"max_rows ({self.max_rows})"
            )
        return self


class ScheduleConfig(Config):
    """When cycles run."""

    interval_s: float = Field(default=4 * 3600.0, gt=0, le=30 * 86_400)
    """Seconds from the end of one cycle to the next."""

    check_every_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds between two checks whether a cycle is due."""

    retry_after_s: float = Field(default=60.0, ge=0, le=86_400)
    """Pause, in seconds, after a training process that registered nothing. A cycle that was given
    up is followed after the smaller of `interval_s` and 600 s, but never before this pause."""

    cycle_timeout_s: float = Field(default=6 * 3600.0, gt=0)
    """Longest run of a training process in seconds; it is then ended and its window repeated."""

    stop_grace_s: float = Field(default=20.0, gt=0, le=600)
    """Seconds that a training process gets to end before it is killed."""

    wait_for_verdict: bool = True
    """Whether a cycle waits until the last candidate has a verdict."""

    health_host: str = "127.0.0.1"
    """Address that the health port listens on."""

    health_port: int = Field(default=9102, ge=0, le=65_535)
    """Port of `/health/live`, `/health/ready` and `/metrics`; 0 switches them off."""
