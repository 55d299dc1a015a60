"""What the policy, the event log, the tables, the rewards and the registry can be told.

These parts are shared by several processes, so their configuration lives with the contract.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config
from onlinerl.rollout_store.schema import FeedbackSource

Aggregate = Literal["last", "first", "mean", "sum"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
SourceWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PolicyConfig(Config):
    """The model that is being improved."""

    name: str = Field(default="assistant", pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)
    """Name of the policy: the served model id and the registered model in MLflow."""

    base_model: str = Field(default="", max_length=4096)
    """Directory or Hugging Face id of the weights that version 1 serves."""


class BrokerConfig(Config):
    """The event log: any broker that speaks the Kafka protocol."""

    bootstrap: str = Field(
        default="127.0.0.1:9092", pattern=r"^\s*[^\s,]+:\d{1,5}\s*(,\s*[^\s,]+:\d{1,5}\s*)*$"
    )
    """Comma-separated `host:port` of brokers."""

    embedded: bool = True
    """Start the broker of the one-machine stack, which keeps its log in memory."""

    partitions: int = Field(default=1, ge=1, le=1024)
    """Partitions of a topic that is created because it is missing."""

    replication: int = Field(default=1, ge=1, le=16)
    """Replicas of a topic that is created because it is missing."""

    request_timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Longest wait for one answer of the broker."""

    @property
    def addresses(self) -> list[str]:
        """Each `host:port` of `bootstrap`."""
        return [address.strip() for address in self.bootstrap.split(",")]


class StoreConfig(Config):
    """Where the tables lie."""

    root: str = ""
    """Folder or object store URI of the tables; empty means `{data_dir}/store`."""

    storage_options: dict[str, str] = Field(default={})
    """Options for an object store, e.g. region and endpoint. Keys belong in the environment."""


class MetricConfig(Config):
    """How the feedback of one metric becomes a number."""

    name: str = Field(min_length=1, max_length=128)
    """The `metric` of the feedback."""

    aggregate: Aggregate = "last"
    """Which value counts when one source gave several: the last or first in time, mean or sum."""

    weight: Finite = 1.0
    """Share of this metric in the reward."""

    scale: Finite = 1.0
    """Multiplies the aggregated value."""

    offset: Finite = 0.0
    """Added after scaling; `scale=2, offset=-1` maps 0 and 1 to -1 and 1."""


class RewardsConfig(Config):
    """How feedback becomes a reward.

    reward = clip(sum over metrics of weight * (scale * value + offset)), where `value` is the mean
    over sources, weighted by `sources`, of each source's aggregate. A metric without feedback adds
    nothing; an interaction without any is unlabelled and has no reward.
    """

    metrics: tuple[MetricConfig, ...] = ()
    """The metrics that count; feedback of other metrics is stored and ignored."""

    sources: dict[FeedbackSource, SourceWeight] = Field(default={})
    """Weight of a source against the others within one metric; 1 when not named, 0 ignores it."""

    clip: tuple[Finite, Finite] = (-1.0, 1.0)
    """Lowest and highest reward."""

    session_discount: float = Field(default=1.0, ge=0, le=1)
    """Feedback on a session counts on an interaction times this, once per turn between them."""

    maturity_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Age of an interaction, in seconds, from which its reward is listed; 0 lists it at once."""

    @model_validator(mode="after")
    def _metric_names_differ(self) -> Self:
        names = [metric.name for metric in self.metrics]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rewards.metrics names {', '.join(repeated)} more than once")
        return self

    @model_validator(mode="after")
    def _clip_is_ordered(self) -> Self:
        low, high = self.clip
        if not low < high or math.isnan(low) or math.isnan(high):
            raise ValueError(f"rewards.clip must be [low, high] with low < high, not {self.clip}")
        return self


class RegistryConfig(Config):
    """The MLflow registry."""

    tracking_uri: str = Field(default="http://127.0.0.1:5000", min_length=1)
    """Address of the MLflow server."""

    embedded: bool = True
    """Start the MLflow server of the one-machine stack: SQLite, one worker, local artifacts."""

    experiment: str = Field(default="onlinerl", min_length=1, max_length=256)
    """MLflow experiment that holds the runs of the cycles."""
