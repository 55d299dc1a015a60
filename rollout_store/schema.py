"""The one declaration of everything that is logged.

Event models (what travels through Kafka) and row models (what lies in the tables); `arrow` derives
the columns. The same field is declared once: a row inherits the event's fields. This file knows
nothing of Kafka, Arrow, Delta or DuckDB.
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
        # numpy is imported late: configuration modules import this file and must stay quick.
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
    """Base of events and rows: unknown fields of newer writers are kept, values are immutable."""

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
    """The sampling parameters that shaped the served distribution."""

    model_config = ConfigDict(frozen=True, extra="allow")

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] = []


class RendererName(BaseModel):
    """What turned messages into tokens."""

    model_config = ConfigDict(frozen=True)

    name: str
    hash: str
    """Hash over the template (and tools), hexadecimal."""


class InteractionFields(Record):
    """What holds for a served request as a whole."""

    interaction_id: str
    """UUIDv7 made by the gateway; idempotency key of the whole pipeline."""
    session_id: str
    """A conversation or agent run."""
    parent_id: str | None = None
    """Interaction whose prompt + completion this prompt starts with, token for token."""
    parent_choice: int = 0
    """Which completion of the parent."""
    prefix_length: int = Field(default=0, ge=0)
    """Tokens shared with the parent's prompt + completion; not repeated in `prompt_token_ids`."""
    prompt_token_ids: TokenIds
    """The prompt after `prefix_length`."""
    prompt_mask_spans: list[TokenSpan] | None = None
    """Spans of `prompt_token_ids` that scrubbing keeps out of every decoded view."""
    policy: str
    """Name of the policy, e.g. `assistant`."""
    arm: Arm = "champion"
    """Which deployment answered."""
    arm_probability: float | None = Field(default=None, gt=0, le=1)
    """Probability with which a session is given this arm; null from writers that did not say."""
    protocol: Protocol = "openai.chat"
    """The API that the client spoke."""
    streamed: bool = False
    """Whether the client asked for a stream."""
    sampling: Sampling
    """The parameters that shaped the served distribution."""
    logprob_mode: LogprobMode = "processed"
    """`processed`: logprobs are those of the served distribution, temperature included."""
    renderer: RendererName
    """What turned messages into tokens."""
    tenant: str
    """Whose API key was used."""
    user: str | None = None
    """Keyed hash of the caller's user id; never the id itself."""
    consent: Consent = "log"
    """What the caller allows: `log` keeps the row, `train` lets it be learned from."""
    trainable: bool = True
    """Whether everything that learning needs is there and consistent."""
    untrainable_reason: str | None = None
    """Why `trainable` is false."""
    served_at: AwareDatetime
    """When the request arrived, UTC."""
    ttft_ms: float | None = None
    """Arrival to first token; null for an answer that was not streamed."""
    latency_ms: float | None = None
    """Arrival to last token."""
    tags: dict[str, str] = {}
    """Free labels of the caller."""


class Completion(BaseModel):
    """One sampled answer."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="allow")

    choice_index: int = Field(default=0, ge=0)
    """Which of several answers to one request."""
    completion_token_ids: TokenIds
    """Every sampled token, once."""
    logprobs: Logprobs
    """Of the served distribution, one per completion token."""
    finish_reason: FinishReason
    """Why sampling ended."""
    version_spans: list[VersionSpan]
    """Tile the completion."""
    mask_spans: list[TokenSpan] | None = None
    """Spans of the completion that scrubbing keeps out of the loss and of every decoded view."""
    routed_experts: str | None = None
    """Base64 `.npy` of expert ids where the engine returns them."""


class InteractionEvent(InteractionFields):
    """A record of `onlinerl.interactions`, keyed by `session_id`."""

    schema_version: int = SCHEMA_VERSION
    choices: list[Completion] = Field(min_length=1)


class FeedbackFields(Record):
    """A signal about an interaction or a session."""

    feedback_id: str = Field(min_length=1, max_length=128)
    """Idempotency key; the client may supply it."""
    interaction_id: str | None = None
    """The interaction it is about, or null."""
    session_id: str | None = None
    """The session it is about, or null."""
    choice_index: int | None = Field(default=None, ge=0)
    """One choice of several; all when absent."""
    metric: str = Field(min_length=1, max_length=128)
    """What was judged; `[rewards]` says which metrics count."""
    value: float | None = None
    """Booleans are 1.0 and 0.0. Null only for a retraction or a demonstration."""
    source: FeedbackSource = "user"
    """Who judged."""
    comment: str | None = None
    """Free text."""
    demonstration: str | None = None
    """The answer that should have been given."""
    retracts: str | None = None
    """Feedback id that no longer counts."""
    tenant: str
    """Whose API key gave it; it counts only on interactions of the same tenant."""
    user: str | None = None
    """Keyed hash of the caller's user id."""
    consent: Consent | None = None
    """What the caller allows; null from writers that did not say, which counts as the consent of
    the interaction."""
    given_at: AwareDatetime
    """When the gateway received it, UTC."""
    tags: dict[str, str] = {}
    """Free labels of the caller."""

    @pydantic.model_validator(mode="after")
    def _has_exactly_one_target(self) -> Self:
        if (self.interaction_id is None) == (self.session_id is None):
            raise ValueError("give exactly one of interaction_id and session_id")
        return self

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.value is None and self.demonstration is None and self.retracts is None:
            raise ValueError("give a value, a demonstration or the id of a feedback to retract")
        return self


class FeedbackEvent(FeedbackFields):
    """A record of `onlinerl.feedback`, keyed by the session or interaction it is about."""

    schema_version: int = SCHEMA_VERSION


class IngestFields(BaseModel):
    """Where a row came from."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    topic: str
    """Topic of the record."""
    partition: int
    """Partition of the record."""
    offset: int
    """Offset of the record; it counts anew when the topic is created anew."""
    ingested_at: AwareDatetime
    """When ingest stored it, UTC."""
    ingest_date: date
    """UTC day of `ingested_at`; the tables are partitioned by it."""
    extra: str | None = None
    """JSON of fields that a newer writer added."""


class InteractionRow(InteractionFields, Completion, IngestFields):
    """Table `interactions`: one row per completion."""

    policy_version: int | None = None
    """Registry version of the last sampled token; null when unknown."""


class FeedbackRow(FeedbackFields, IngestFields):
    """Table `feedback`: append-only, joined at read time."""


class DeadLetterRow(Record):
    """Table `dead_letters`: a record that broke the contract, kept as it came."""

    topic: str
    """Topic of the record."""
    partition: int
    """Partition of the record."""
    offset: int
    """Offset of the record."""
    reason: str
    """What is wrong with it; never what it contains."""
    key: bytes | None = None
    """Key of the record."""
    payload: bytes
    """Value of the record, byte for byte."""
    ingested_at: AwareDatetime
    """When ingest stored it, UTC."""
    ingest_date: date
    """UTC day of `ingested_at`."""


class PromotionRow(Record):
    """Table `promotions`: every change of what serves, and every refusal."""

    promotion_id: str
    """Same for every report of one change."""
    policy: str
    """Name of the policy."""
    version: int
    """Version that the change is about."""
    from_version: int | None = None
    """Version that served before."""
    action: Literal["bootstrap", "promote", "rollback", "refuse", "fail"]
    """What was done."""
    reason: str
    """Why; for a refusal the gates that said no."""
    actor: str
    """`controller`, or who asked."""
    pause_ms: float | None = None
    """Longest time that a replica did not generate."""
    stage_ms: float | None = None
    """Time to stage the weights on every replica, while serving."""
    delta_bytes: int | None = None
    """Size of what was sent."""
    full_bytes: int | None = None
    """Size of all weights."""
    changed_fraction: float | None = None
    """Share of weights whose bits differ."""
    max_abs_logprob_diff: float | None = None
    """Engine against transformers, worst probe token."""
    mean_abs_logprob_diff: float | None = None
    """Engine against transformers on the probe tokens after the swap, worst replica."""
    decided_at: AwareDatetime
    """When it was done, UTC."""
    ingest_date: date
    """UTC day of `decided_at`."""


class AuditRow(Record):
    """Table `audit`: who did what to which version or row."""

    audit_id: str
    """Same for every report of one act."""
    actor: str
    """Who."""
    action: str
    """Did what."""
    subject: str
    """To what: a version, a row, a user's hash."""
    detail: str | None = None
    """More, as text or JSON."""
    acted_at: AwareDatetime
    """When, UTC."""
    ingest_date: date
    """UTC day of `acted_at`."""


class ArmRow(Record):
    """Table `arms`: which versions take part of the traffic. The newest decision of a policy holds.

    A decision is one row per arm beside the champion, which gets what is left; a decision without
    canary and shadow is one row of the champion.
    """

    decision_id: str
    """Same for every row of one decision."""
    policy: str
    """Name of the policy."""
    arm: Arm
    """champion, canary or shadow."""
    version: int
    """Version that the arm serves."""
    share: float = Field(ge=0, le=1)
    """Share of sessions; of a shadow, the share of requests that are answered a second time."""
    adapter: str | None = None
    """Name of the LoRA adapter, `assistant@12`; null when a replica serves the full weights."""
    decided_at: AwareDatetime
    """When, UTC."""
    ingest_date: date
    """UTC day of `decided_at`."""


class SnapshotRow(Record):
    """Table `snapshots`: which table versions are held, under which name. The newest row counts."""

    name: str
    """Name of the snapshot."""
    action: Literal["create", "drop", "mark"]
    """`mark`: an erased user's rows were in it."""
    versions: str
    """JSON object of table versions."""
    actor: str
    """Who."""
    reason: str
    """Why: free text, or which erasure marked it."""
    expires_at: AwareDatetime | None = None
    """From when on nothing is held; null holds until it is dropped."""
    acted_at: AwareDatetime
    """When, UTC."""
    ingest_date: date
    """UTC day of `acted_at`."""


class ErasedRow(Record):
    """Table `erased`: what must not come back, as digests that say nothing without the original."""

    erasure_id: str
    """Same for every row of one erasure."""
    kind: Literal["user", "session", "interaction"]
    """What the digest is of."""
    digest: str
    """SHA-256 over kind, tenant and id, hexadecimal, 32 digits."""
    before_at: AwareDatetime
    """Events of a user or session up to this time are left out; of an interaction, all of them."""
    acted_at: AwareDatetime
    """When, UTC."""
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
