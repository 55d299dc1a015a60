"""The one declaration of everything that is logged.

Event models describe the records in Kafka, and row models the rows in the tables; `tables.arrow`
derives the columns. Each field is declared once: a row inherits the fields of its event. This file
does not depend on Kafka, Arrow, Delta or DuckDB.
"""

import base64
import typing
from datetime import date
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

SCHEMA_VERSION = 1
INTERACTIONS_TOPIC = "onlinerl.interactions"
FEEDBACK_TOPIC = "onlinerl.feedback"

Arm = Literal["champion", "canary", "shadow"]
Consent = Literal["none", "log", "train"]
FinishReason = Literal["stop", "length", "tool_calls", "client_disconnect", "abort", "error"]
FeedbackSource = Literal["user", "implicit", "verifier", "judge", "operator"]
LogprobMode = Literal["raw", "processed"]
Protocol = Literal["openai.chat", "openai.completions", "openai.responses", "anthropic.messages"]


def _unpack(typecode: str) -> typing.Callable[[object], object]:
    def decode(value: object) -> object:
        if not isinstance(value, str):
            return value
        # numpy is imported late, because configuration modules import this file at every start.
        import numpy as np

        return np.frombuffer(base64.b64decode(value, validate=True), dtype=typecode).tolist()

    return decode


def _pack(typecode: str) -> typing.Callable[[list[Any]], str]:
    def encode(values: list[Any]) -> str:
        import numpy as np

        return base64.b64encode(np.asarray(values, dtype=typecode).tobytes()).decode("ascii")

    return encode


TokenIds = Annotated[
    list[int],
    BeforeValidator(_unpack("<i4")),
    PlainSerializer(_pack("<i4"), return_type=str, when_used="json"),
]
"""Token ids; base64 of little-endian int32 in JSON, list<int32> in Arrow."""

Logprobs = Annotated[
    list[float],
    BeforeValidator(_unpack("<f4")),
    PlainSerializer(_pack("<f4"), return_type=str, when_used="json"),
]
"""Natural-log probabilities; base64 of little-endian float32 in JSON, list<float> in Arrow."""


class Record(BaseModel):
    """Base of events and rows: keeps unknown fields of newer writers; values are immutable."""

    model_config = ConfigDict(
        extra="allow", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )


class VersionSpan(BaseModel):
    """Tokens `start` to `end` (exclusive) of a completion were sampled by `version`."""

    model_config = ConfigDict(frozen=True)

    version: str
    """Policy version as the engine stamped it, e.g. `assistant/12`."""
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class TokenSpan(BaseModel):
    """Tokens `start` to `end` (exclusive) of a list of tokens."""

    model_config = ConfigDict(frozen=True)

    start: int = Field(ge=0)
    end: int = Field(ge=0)


class Sampling(BaseModel):
    """The sampling parameters that determined the served distribution."""

    model_config = ConfigDict(frozen=True, extra="allow")

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] = []


class RendererName(BaseModel):
    """Identifies the renderer that turned messages into tokens."""

    model_config = ConfigDict(frozen=True)

    name: str
    hash: str
    """Hash over the template (and tools), hexadecimal."""


class InteractionFields(Record):
    """The fields of a served request, which all of its completions share."""

    interaction_id: str
    """UUIDv7 from the gateway; the idempotency key of the whole pipeline."""
    session_id: str
    """Conversation or agent run that the request belongs to."""
    parent_id: str | None = None
    """Interaction whose prompt + completion this prompt starts with, token for token."""
    parent_choice: int = 0
    """Index of the parent's completion that this prompt contains."""
    prefix_length: int = Field(default=0, ge=0)
    """Number of tokens shared with the parent's prompt + completion; not in `prompt_token_ids`."""
    prompt_token_ids: TokenIds
    """The tokens of the prompt after the first `prefix_length`."""
    prompt_mask_spans: list[TokenSpan] | None = None
    """Spans of `prompt_token_ids` that scrubbing hides: they are never decoded."""
    policy: str
    """Name of the policy, e.g. `assistant`."""
    arm: Arm = "champion"
    """Arm that answered: champion, canary or shadow."""
    arm_probability: float | None = Field(default=None, gt=0, le=1)
    """Probability with which a session gets this arm; null from older writers."""
    protocol: Protocol = "openai.chat"
    """API that the client used."""
    streamed: bool = False
    """Whether the client asked for a stream."""
    sampling: Sampling
    """Sampling parameters that determined the served distribution."""
    logprob_mode: LogprobMode = "processed"
    """`processed`: logprobs are those of the served distribution, temperature included."""
    renderer: RendererName
    """Renderer that turned messages into tokens."""
    tenant: str
    """Tenant of the API key that was used."""
    user: str | None = None
    """Keyed hash of the caller's user id; never the id itself."""
    consent: Consent = "log"
    """What the caller allows: `log` to store the row, `train` also to train on it."""
    trainable: bool = True
    """Whether everything that training needs is present and consistent."""
    untrainable_reason: str | None = None
    """Why `trainable` is false."""
    served_at: AwareDatetime
    """Time at which the request arrived, UTC."""
    ttft_ms: float | None = None
    """Milliseconds from the request's arrival to the first token; null if it was not streamed."""
    latency_ms: float | None = None
    """Milliseconds from the request's arrival to the last token."""
    tags: dict[str, str] = {}
    """Labels that the caller chose."""


class Completion(BaseModel):
    """One sampled answer."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="allow")

    choice_index: int = Field(default=0, ge=0)
    """Index of the completion among those of one request."""
    completion_token_ids: TokenIds
    """Every sampled token, exactly once."""
    logprobs: Logprobs
    """Logprob of each completion token under the served distribution."""
    finish_reason: FinishReason
    """Why sampling ended."""
    version_spans: list[VersionSpan]
    """Version that sampled each part of the completion; the spans cover it without gaps."""
    mask_spans: list[TokenSpan] | None = None
    """Spans of the completion that scrubbing hides: they are never decoded or trained on."""
    routed_experts: str | None = None
    """Base64 of a `.npy` file with expert ids, if the engine returns them."""


class InteractionEvent(InteractionFields):
    """A record of `onlinerl.interactions`, keyed by `session_id`."""

    schema_version: int = SCHEMA_VERSION
    choices: list[Completion] = Field(min_length=1)


class FeedbackFields(Record):
    """A signal about an interaction or a session."""

    feedback_id: str = Field(min_length=1, max_length=128)
    """Idempotency key; the client may supply it."""
    interaction_id: str | None = None
    """Interaction that was judged, or null."""
    session_id: str | None = None
    """Session that was judged, or null."""
    choice_index: int | None = Field(default=None, ge=0)
    """Completion that was judged; all completions of the interaction when null."""
    metric: str = Field(min_length=1, max_length=128)
    """Name of the metric; `[rewards]` lists the metrics that count."""
    value: float | None = None
    """Booleans are 1.0 and 0.0. Null only for a retraction or a demonstration."""
    source: FeedbackSource = "user"
    """Kind of judge."""
    comment: str | None = None
    """Free text."""
    demonstration: str | None = None
    """The answer that should have been given."""
    retracts: str | None = None
    """Id of the feedback that this feedback retracts."""
    tenant: str
    """Tenant of the API key that was used. Feedback counts only on interactions of its tenant."""
    user: str | None = None
    """Keyed hash of the caller's user id."""
    consent: Consent | None = None
    """What the caller allows; null counts as the consent of the interaction."""
    given_at: AwareDatetime
    """Time at which the gateway received it, UTC."""
    tags: dict[str, str] = {}
    """Labels that the caller chose."""

    @pydantic.model_validator(mode="after")
    def _has_exactly_one_target(self) -> Self:
        if (self.interaction_id is None) == (self.session_id is None):
            raise ValueError("give exactly one of interaction_id and session_id")
        return self

    @pydantic.model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.value is None and self.demonstration is None and self.retracts is None:
            raise ValueError("give a value, a demonstration or the id of a feedback to retract")
        return self


class FeedbackEvent(FeedbackFields):
    """A record of `onlinerl.feedback`, keyed by the session or interaction that was judged."""

    schema_version: int = SCHEMA_VERSION


class IngestFields(BaseModel):
    """The origin of a row."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    topic: str
    """Topic of the record."""
    partition: int
    """Partition of the record."""
    offset: int
    """Offset of the record; a topic that is created again starts at 0 again."""
    ingested_at: AwareDatetime
    """Time at which ingest stored it, UTC."""
    ingest_date: date
    """UTC day of `ingested_at`; the tables are partitioned by it."""
    extra: str | None = None
    """JSON object of unknown fields from a newer writer."""


class InteractionRow(InteractionFields, Completion, IngestFields):
    """Table `interactions`: one row per completion."""

    policy_version: int | None = None
    """Registry version of the last sampled token; null when unknown."""


class FeedbackRow(FeedbackFields, IngestFields):
    """Table `feedback`: append-only; views join it with interactions when it is read."""


class DeadLetterRow(Record):
    """Table `dead_letters`: records that broke the contract, unchanged."""

    topic: str
    """Topic of the record."""
    partition: int
    """Partition of the record."""
    offset: int
    """Offset of the record."""
    reason: str
    """What is wrong with the record, without its contents."""
    key: bytes | None = None
    """Key of the record."""
    payload: bytes
    """Value of the record, byte for byte."""
    ingested_at: AwareDatetime
    """Time at which ingest stored it, UTC."""
    ingest_date: date
    """UTC day of `ingested_at`."""


class PromotionRow(Record):
    """Table `promotions`: every change of the served version, and every refused change."""

    promotion_id: str
    """Id of the change; the same in every report of it."""
    policy: str
    """Name of the policy."""
    version: int
    """Version that was promoted, restored or refused."""
    from_version: int | None = None
    """Version that served before."""
    action: Literal["bootstrap", "promote", "rollback", "refuse", "fail"]
    """What was done."""
    reason: str
    """Why; for a refusal, the gates that failed."""
    actor: str
    """`controller`, or the operator who asked."""
    pause_ms: float | None = None
    """Longest pause of generation on any replica, in milliseconds."""
    stage_ms: float | None = None
    """Milliseconds to stage the weights on every replica while they serve."""
    delta_bytes: int | None = None
    """Bytes that were sent."""
    full_bytes: int | None = None
    """Bytes of all weights."""
    changed_fraction: float | None = None
    """Share of weights whose bits differ."""
    max_abs_logprob_diff: float | None = None
    """Largest difference of a probe token's logprob between the engine and transformers."""
    mean_abs_logprob_diff: float | None = None
    """Mean difference of the probe tokens' logprobs after the swap, on the worst replica."""
    decided_at: AwareDatetime
    """Time of the decision, UTC."""
    ingest_date: date
    """UTC day of `decided_at`."""


class AuditRow(Record):
    """Table `audit`: who did what to which version or row."""

    audit_id: str
    """Id of the act; the same in every report of it."""
    actor: str
    """Operator or process that acted."""
    action: str
    """Name of the action."""
    subject: str
    """What it was done to: a version, a row, or a user's hash."""
    detail: str | None = None
    """Details, as text or JSON."""
    acted_at: AwareDatetime
    """Time of the act, UTC."""
    ingest_date: date
    """UTC day of `acted_at`."""


class ArmRow(Record):
    """Table `arms`: which versions get a share of the traffic. A policy's newest decision holds.

    A decision has one row per canary and shadow; the champion gets the rest of the traffic. A
    decision without canary and shadow has one row for the champion.
    """

    decision_id: str
    """Id of the decision; the same in all of its rows."""
    policy: str
    """Name of the policy."""
    arm: Arm
    """champion, canary or shadow."""
    version: int
    """Version that the arm serves."""
    share: float = Field(ge=0, le=1)
    """Share of sessions; for a shadow, the share of requests that it also answers."""
    adapter: str | None = None
    """Name of the LoRA adapter, `assistant@12`; null when a replica serves the full weights."""
    decided_at: AwareDatetime
    """Time of the decision, UTC."""
    ingest_date: date
    """UTC day of `decided_at`."""


class SnapshotRow(Record):
    """Table `snapshots`: named table versions that are held. The newest row of a name counts."""

    name: str
    """Name of the snapshot."""
    action: Literal["create", "drop", "mark"]
    """`mark`: rows or files of the snapshot are gone, so it cannot be read any more."""
    versions: str
    """JSON object with the version of each table."""
    actor: str
    """Operator or process that acted."""
    reason: str
    """Why: free text, or the erasure that marked the snapshot."""
    expires_at: AwareDatetime | None = None
    """Time at which the hold ends, UTC; null holds until the snapshot is dropped."""
    acted_at: AwareDatetime
    """Time of the act, UTC."""
    ingest_date: date
    """UTC day of `acted_at`."""


class ErasedRow(Record):
    """Table `erased`: ids that must not be stored again, as digests that do not reveal them."""

    erasure_id: str
    """Id of the erasure; the same in all of its rows."""
    kind: Literal["user", "session", "interaction"]
    """Kind of the id."""
    digest: str
    """SHA-256 over kind, tenant and id, hexadecimal, 32 digits."""
    before_at: AwareDatetime
    """Events of a user or session up to this time are excluded; of an interaction, all events."""
    acted_at: AwareDatetime
    """Time of the erasure, UTC."""
    ingest_date: date
    """UTC day of `acted_at`."""


TABLES: dict[str, type[BaseModel]] = {
    "interactions": InteractionRow,
    "feedback": FeedbackRow,
    "dead_letters": DeadLetterRow,
    "promotions": PromotionRow,
    "audit": AuditRow,
    "arms": ArmRow,
    "snapshots": SnapshotRow,
    "erased": ErasedRow,
}
"""Every table by name; all are partitioned by `ingest_date`."""
