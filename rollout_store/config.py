"""The configuration of the policy, the event log, the tables, the rewards and the registry.

Several processes share these parts, so their configuration lies beside the shared schema.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config
from onlinerl.rollout_store.schema import FeedbackSource

Aggregate = Literal["last", "first", "mean", "sum"]
MetricType = Literal["bool", "float"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
SourceWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


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
    """Whether to start the broker of the one-machine stack, which keeps its log in memory."""

    partitions: int = Field(default=1, ge=1, le=1024)
    """Partitions of a topic that onlinerl creates."""

    replication: int = Field(default=1, ge=1, le=16)
    """Replicas of a topic that onlinerl creates."""

    request_timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Seconds to wait for one response of the broker."""

    @property
    def addresses(self) -> list[str]:
        """Each `host:port` of `bootstrap`."""
        return [address.strip() for address in self.bootstrap.split(",")]


class StoreConfig(Config):
    """Where the tables lie."""

    root: str = ""
    """Folder or object store URI of the tables; empty means `{data_dir}/store`."""

    storage_options: dict[str, str] = Field(default={})
    """Options for an object store, e.g. region and endpoint. Put keys into the environment."""

    query_memory_mib: int = Field(default=2_048, ge=64, le=4_194_304)
    """Memory of a query on the views, in MiB; a larger query spills to a temporary folder."""

    query_threads: int = Field(default=0, ge=0, le=1024)
    """Threads of a query on the views; 0 uses one per core."""


class MetricConfig(Config):
    """How the feedback of one metric becomes a number.

    A value that is not of `type` is ignored; the view `feedback_use` lists it.
    """

    name: str = Field(min_length=1, max_length=128)
    """The `metric` of the feedback."""

    type: MetricType = "float"
    """`bool` accepts only 0 and 1, `float` any finite number."""

    aggregate: Aggregate = "last"
    """How several values of one source become one: last or first in time, mean, or sum."""

    aggregates: dict[FeedbackSource, Aggregate] = Field(default={})
    """`aggregate` by source, for sources where it differs."""

    weight: Finite = 1.0
    """Weight of this metric in the reward."""

    sources: dict[FeedbackSource, SourceWeight] = Field(default={})
    """`rewards.sources` for this metric, for sources where it differs."""

    scale: Finite = 1.0
    """Factor for the aggregated value."""

    offset: Finite = 0.0
    """Added after scaling; `scale=2, offset=-1` maps 0 and 1 to -1 and 1."""

    threshold: float | None = Field(default=None, gt=0, lt=1)
    """Break-even rate: a value that passes counts `1 - threshold`, any other `-threshold`. Answers
    that pass less often than this are negative on average, which is worse than silence, 0."""

    passes_at: Finite = 1.0
    """Lowest value that passes; used only with `threshold`."""

    default: Finite | None = None
    """The number, before `weight`, for a mature interaction without feedback of this metric. When
    absent, such an interaction stays unlabelled. With a `threshold`, 0 breaks even."""

    final: bool = False
    """Whether an interaction is mature as soon as it has feedback of this metric."""

    @model_validator(mode="after")
    def _threshold_replaces_scale(self) -> Self:
        if self.threshold is not None and (self.scale, self.offset) != (1.0, 0.0):
            raise ValueError(
                f"metric {self.name} has a threshold, which gives 1 - threshold and -threshold; "
                "leave out scale and offset, and set its size with weight"
            )
        return self

    def aggregate_of(self, source: FeedbackSource) -> Aggregate:
        """How several values of this source become one."""
        return self.aggregates.get(source, self.aggregate)


class SuspicionConfig(Config):
    """When feedback is suspicious; see the view `suspicions`."""

    user_share: Share = 0.5
    """A user with more than this share of a tenant's feedback in one window is flagged."""

    source_share: Share = 1.0
    """A source with more than this share is flagged in the same way; 1 flags none."""

    window_s: float = Field(default=86_400.0, ge=1, le=31_536_000)
    """Length of the windows in seconds; the windows are aligned to 1970 in UTC."""

    min_feedback: int = Field(default=20, ge=1)
    """Smallest number of feedback in a window for which shares are judged."""

    burst_feedback: int = Field(default=30, ge=2)
    """A user who gives this much feedback within `burst_s` is flagged."""

    burst_s: float = Field(default=60.0, gt=0, le=86_400)
    """Length of a burst, in seconds."""


class RewardsConfig(Config):
    """How feedback becomes a reward.

    reward = clip(sum over metrics of weight * (scale * value + offset)), where `value` is the mean
    over sources, weighted by `sources`, of each source's aggregate. A metric without feedback adds
    its `default`, or nothing. An interaction with neither is unlabelled and has no reward.
    """

    metrics: tuple[MetricConfig, ...] = ()
    """The metrics that count; feedback of other metrics is stored and ignored."""

    sources: dict[FeedbackSource, SourceWeight] = Field(default={})
    """Weight of a source relative to others within a metric; 1 if not named, and 0 ignores it."""

    clip: tuple[Finite, Finite] = (-1.0, 1.0)
    """Lowest and highest reward."""

    session_discount: float = Field(default=1.0, ge=0, le=1)
    """Factor for feedback on a session, applied once for each turn after the interaction."""

    attribution_window_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds after an interaction during which feedback counts on it. The reward is listed when
    they have passed. When absent, any later feedback counts."""

    maturity_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Age of an interaction, in seconds, at which its reward is listed, if that is later than the
    end of the attribution window. Feedback of a `final` metric ends both waits."""

    user_cap: Share | None = None
    """Largest share of a tenant's feedback in one window of `suspicion.window_s` that counts for
    one user. If a user gives more, each feedback of the user weighs less, and so does the row that
    it labels. No cap when absent."""

    suspicion: SuspicionConfig = Field(default_factory=SuspicionConfig)
    """When feedback is flagged; flagged feedback still counts."""

    @property
    def listed_after_s(self) -> float:
        """Age, in seconds, at which a reward is listed without feedback of a final metric."""
        return max(self.maturity_s, self.attribution_window_s or 0.0)

    def source_weight(self, metric: MetricConfig, source: FeedbackSource) -> float:
        """Weight of a source within a metric."""
        return metric.sources.get(source, self.sources.get(source, 1.0))

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
    """Whether to start the MLflow server of the one-machine stack: SQLite, local artifacts."""

    experiment: str = Field(default="onlinerl", min_length=1, max_length=256)
    """MLflow experiment that holds the runs of the cycles."""
