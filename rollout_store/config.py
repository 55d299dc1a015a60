"""Configuration of the policy, the event log, the tables, the rewards and the registry.

Several processes share these parts, so their configuration stands beside the schemas.
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
    """Folder or Hugging Face id of the model that version 1 serves."""


class BrokerConfig(Config):
    """The event log: any broker that speaks the Kafka protocol."""

    bootstrap: str = Field(
        default="127.0.0.1:9092", pattern=r"^\s*[^\s,]+:\d{1,5}\s*(,\s*[^\s,]+:\d{1,5}\s*)*$"
    )
    """Addresses of brokers: `host:port`, separated by commas."""

    embedded: bool = True
    """Whether `onlinerl up` starts a broker of its own, which keeps its log in memory."""

    partitions: int = Field(default=1, ge=1, le=1024)
    """Number of partitions of a topic that onlinerl creates."""

    replication: int = Field(default=1, ge=1, le=16)
    """Number of replicas of a topic that onlinerl creates."""

    request_timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Longest wait for one response of the broker, in seconds."""

    @property
    def addresses(self) -> list[str]:
        """The `host:port` of each broker in `bootstrap`."""
        return [address.strip() for address in self.bootstrap.split(",")]


class StoreConfig(Config):
    """The storage of the tables, and the resources of queries on them."""

    root: str = ""
    """Folder or object store URI of the tables; `{data_dir}/store` when empty."""

    storage_options: dict[str, str] = Field(default={})
    """Options of the object store, e.g. its region. Keep access keys in the environment."""

    query_memory_mib: int = Field(default=2_048, ge=64, le=4_194_304)
    """Memory of a query, in MiB; beyond it DuckDB spills to a temporary folder."""

    query_threads: int = Field(default=0, ge=0, le=1024)
    """Threads of a query; 0 takes one per core."""


class MetricConfig(Config):
    """How the feedback of one metric becomes a number.

    Values that are not of `type` are ignored; the view `feedback_use` counts them.
    """

    name: str = Field(min_length=1, max_length=128)
    """Name of the metric, as feedback has it in `metric`."""

    type: MetricType = "float"
    """Accepted values: `bool` means 0 and 1 only, `float` any finite number."""

    aggregate: Aggregate = "last"
    """How several values of one source become one: last or first in time, mean or sum."""

    aggregates: dict[FeedbackSource, Aggregate] = Field(default={})
    """Overrides `aggregate` for single sources."""

    weight: Finite = 1.0
    """Factor of this metric in the sum that is the reward."""

    sources: dict[FeedbackSource, SourceWeight] = Field(default={})
    """Overrides `rewards.sources` for this metric."""

    scale: Finite = 1.0
    """Factor of the aggregated value."""

    offset: Finite = 0.0
    """Added to the scaled value; `scale=2, offset=-1` maps 0 and 1 to -1 and 1."""

    threshold: float | None = Field(default=None, gt=0, lt=1)
    """Break-even pass rate: a value that passes counts 1 - threshold, any other -threshold. An
    answer that passes less often than this is on average worth less than silence, which is 0."""

    passes_at: Finite = 1.0
    """Lowest value that passes; only with `threshold`."""

    default: Finite | None = None
    """Value, before `weight`, of a mature interaction without feedback of this metric. When absent,
    such an interaction stays unlabelled. With `threshold`, silence counts 0."""

    final: bool = False
    """Whether feedback of this metric makes its interaction mature at once."""

    @model_validator(mode="after")
    def _threshold_replaces_scale(self) -> Self:
        if self.threshold is not None and (self.scale, self.offset) != (1.0, 0.0):
            raise ValueError(
                f"metric {self.name} has a threshold, which gives 1 - threshold and -threshold; "
                "leave out scale and offset, and use weight for its size"
            )
        return self

    def aggregate_of(self, source: FeedbackSource) -> Aggregate:
        """The aggregate that applies to a source."""
        return self.aggregates.get(source, self.aggregate)


class SuspicionConfig(Config):
    """Bounds above which the view `suspicions` flags feedback as a possible manipulation."""

    user_share: Share = 0.5
    """Share of a tenant's feedback in one window above which a user is flagged."""

    source_share: Share = 1.0
    """Share of a tenant's feedback in one window above which a source is flagged; 1 flags none."""

    window_s: float = Field(default=86_400.0, ge=1, le=31_536_000)
    """Length of a window in seconds; windows are counted from 1970 in UTC."""

    min_feedback: int = Field(default=20, ge=1)
    """Number of feedback events below which a window is not judged."""

    burst_feedback: int = Field(default=30, ge=2)
    """Number of feedback events within `burst_s` at which a user is flagged."""

    burst_s: float = Field(default=60.0, gt=0, le=86_400)
    """Length of a burst in seconds."""


class RewardsConfig(Config):
    """How feedback becomes a reward.

    reward = clip(sum over metrics of weight * (scale * value + offset)), where `value` is the mean
    over sources, weighted by `sources`, of each source's aggregate. A metric without feedback adds
    its `default`, or nothing. An interaction without feedback or default is unlabelled: it has no
    reward.
    """

    metrics: tuple[MetricConfig, ...] = ()
    """The metrics that make the reward; feedback of other metrics is stored and ignored."""

    sources: dict[FeedbackSource, SourceWeight] = Field(default={})
    """Weight of each source within a metric; 1 for a source that is absent, 0 ignores it."""

    clip: tuple[Finite, Finite] = (-1.0, 1.0)
    """Lowest and highest reward; others are clipped."""

    session_discount: float = Field(default=1.0, ge=0, le=1)
    """Factor on session feedback for an interaction, applied once per turn between the two."""

    attribution_window_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds after an interaction during which feedback counts for it; its reward is listed after
    that. When absent, feedback counts at any time."""

    maturity_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Age in seconds at which an interaction's reward is listed, if that is later than the end of
    the attribution window. A `final` metric ends both waits."""

    user_cap: Share | None = None
    """Largest share of a tenant's feedback that one user can have in a window of
    `suspicion.window_s`. Above it, each feedback of that user, and each row that it labels, has
    less weight. When absent, there is no cap."""

    suspicion: SuspicionConfig = Field(default_factory=SuspicionConfig)
    """Bounds above which feedback is flagged. Flagged feedback still counts."""

    @property
    def listed_after_s(self) -> float:
        """Age in seconds at which a reward is listed without feedback of a `final` metric."""
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
    """Whether `onlinerl up` starts an MLflow server: SQLite, one worker, local artifacts."""

    experiment: str = Field(default="onlinerl", min_length=1, max_length=256)
    """MLflow experiment that holds the runs of the cycles."""
