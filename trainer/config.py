"""Configuration of the trainer and its schedule. Importing this module must not import torch."""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from onlinerl.base_config import Config

LossName = Literal["importance_sampling", "tis", "icepop", "ppo", "cispo", "gspo", "dppo"]
FilterName = Literal["k3", "veto", "geometric"]


class TrainerConfig(Config):
    """One cycle: which rows it may read, how it corrects for their age, how far it may move."""

    loss: LossName = "tis"
    """Per-token policy loss; see `trainer/losses/policy.py` for each formula and its source."""

    ratio_cap: float = Field(default=2.0, ge=1, le=100)
    """Upper bound on the importance ratio of `tis`."""

    ratio_low: float | None = Field(default=None, ge=0, le=1)
    """Lower bound of `icepop`, `ppo`, `cispo`, `gspo`; unset takes the published default."""

    ratio_high: float | None = Field(default=None, ge=1, le=100)
    """Upper bound of `icepop`, `ppo`, `cispo`, `gspo`; unset takes the published default."""

    filters: tuple[FilterName, ...] = ("k3", "veto")
    """Rows (one completion each) that fail any of these filters are left out of the policy loss."""

    k3_max: float = Field(default=0.01, gt=0, le=10)
    """Filter `k3`: keep a row while its mean of r - log r - 1 is at most this, nats per token."""

    veto_ratio: float = Field(default=1e-5, gt=0, lt=1)
    """Filter `veto`: drop a row that holds a token with a ratio below this."""

    geometric_band: float = Field(default=0.01, gt=0, lt=1)
    """Filter `geometric`: keep a row while exp(mean log r) is within 1 +- this."""

    kl_coef: float = Field(default=0.05, ge=0, le=10)
    """Weight of the exact KL to the base model per sampled token; 0 does not load the base."""

    learning_rate: float = Field(default=2e-5, gt=0, le=1)
    """Peak AdamW learning rate, after warm-up."""

    warmup_steps: int = Field(default=0, ge=0, le=10_000)
    """Optimizer steps over which the learning rate rises linearly to its peak."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled AdamW weight decay."""

    grad_clip: float = Field(default=1.0, gt=0, le=1e6)
    """Bound on the global gradient norm of a step."""

    tokens_per_step: int = Field(default=4096, ge=1, le=100_000_000)
    """Sampled tokens an optimizer step aims at; a window is split evenly into whole steps."""

    epochs: int = Field(default=1, ge=1, le=20)
    """Passes over the window."""

    micro_batch_tokens: int = Field(default=1024, ge=16, le=10_000_000)
    """Tokens per forward pass, padding included; bounds activation memory: about 2 GiB per 1024
    tokens for a model of 135 M parameters."""

    max_row_tokens: int = Field(default=4096, ge=8, le=10_000_000)
    """Rows with more tokens than this, prompt and completion, are left out and counted."""

    stop_k3: float = Field(default=0.05, gt=0, le=100)
    """The cycle stops before a step whose mean k3 exceeds this, nats per token."""

    stop_ess: float = Field(default=0.3, ge=0, lt=1)
    """The cycle stops before a step whose token ESS/n is below this."""

    max_engine_gap: float = Field(default=0.1, gt=0, le=100)
    """The cycle fails when, before its first step, the mean |log r| of rows that the parent version
    itself served exceeds this: engine and trainer then do not hold the same weights. Nats."""

    adapter: Literal["none", "lora"] = "none"
    """`none` trains the weights themselves; `lora` an adapter that is merged when saved."""

    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank of the adapter matrices."""

    lora_alpha: float = Field(default=32.0, gt=0, le=4096)
    """Adapter scale: its output is multiplied by alpha / rank."""

    lora_targets: tuple[str, ...] = ("all-linear",)
    """Module name endings that get an adapter; `all-linear` means every one but the head."""

    trainable: str = ".*"
    """Regular expression that is searched in parameter names: what `adapter = none` trains."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass; `auto` is float32 on a CPU and bfloat16 on a GPU."""

    device: str = Field(default="auto", min_length=1)
    """Torch device; `auto` takes a GPU when there is one."""

    num_threads: int = Field(default=0, ge=0, le=1024)
    """Torch CPU threads; 0 leaves the choice to torch."""

    seed: int = Field(default=0, ge=0)
    """Orders the rows and initialises adapters; a cycle adds its own number."""

    max_rows: int = Field(default=512, ge=1, le=10_000_000)
    """Most completions in a window; the newest are taken."""

    min_labelled_rows: int = Field(default=64, ge=1, le=10_000_000)
    """A cycle does not start on fewer labelled rows."""

    max_version_lag: int = Field(default=2, ge=0, le=100)
    """Promotions after which a row is too old to learn from."""

    max_age_s: float = Field(default=7 * 86_400.0, gt=0)
    """Rows served longer ago than this are left out, seconds."""

    heldout_fraction: float = Field(default=0.15, ge=0, le=0.9)
    """Share of sessions that no cycle reads; the deploy gates judge candidates on them."""

    baseline_decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the exponential mean reward of a tenant, per session."""

    task_tag: str = "task"
    """Rows whose tag of this name has the same value form a group with a leave-one-out baseline."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    """A cycle whose update ended without a result this often is marked as failed, and its rows are
    free again."""

    lease_ttl_s: float = Field(default=60.0, ge=1, le=3600)
    """Seconds after which a lease that its holder does not renew may be taken over."""

    hold_s: float = Field(default=86_400.0, ge=60, le=30 * 86_400)
    """Seconds that the rows of a window are kept readable for a cycle that does not end; every
    attempt starts the time again."""

    keep_cycles: int = Field(default=3, ge=1, le=1000)
    """Finished cycles whose local checkpoint folder is kept on disk."""

    registry_timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Seconds that the registry may take to answer before it counts as unavailable."""

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
    """A cycle is due this long after the last one finished, seconds."""

    check_every_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds between two checks whether a cycle is due."""

    retry_after_s: float = Field(default=60.0, ge=0, le=86_400)
    """Pause after a training process that registered nothing, seconds. A cycle that was given up is
    followed after `interval_s`, or 600 s if that is shorter, or this if it is longer."""

    cycle_timeout_s: float = Field(default=6 * 3600.0, gt=0)
    """A training process that runs longer than this is ended; its window is repeated, seconds."""

    stop_grace_s: float = Field(default=20.0, gt=0, le=600)
    """How long a training process may take to end when it is asked to, seconds."""

    wait_for_verdict: bool = True
    """Do not train while the last candidate has no verdict yet."""

    health_host: str = "127.0.0.1"
    """Address of the health and metrics endpoints."""

    health_port: int = Field(default=9102, ge=0, le=65_535)
    """Port of the health and metrics endpoints; 0 switches them off."""
