"""What the gateway can be told. Imports neither aiohttp, Kafka nor a tokenizer."""

from typing import Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config
from onlinerl.rollout_store.schema import Consent


class ApiKeyConfig(Config):
    """A caller: the key itself is never in a file, only its SHA-256."""

    name: str = Field(min_length=1, max_length=64)
    """How logs and metrics call this key."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Lower-case hexadecimal SHA-256 of the key: `printf %s KEY | sha256sum`."""

    tenant: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Prefix cache, conversations and feedback are kept apart by tenant."""

    consent: Consent = "log"
    """What may be done with this key's traffic; a request can only narrow it."""


class SamplingDefaults(Config):
    """Sampling parameters of a request that does not name them."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divides the logits; 0 is greedy, which is served but not trained on."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Bound on the completion, tokens; the rest of the context when absent."""


class LimitsConfig(Config):
    """Bounds on what one gateway process takes in."""

    max_in_flight: int = Field(default=256, ge=1, le=100_000)
    """Requests being answered at once; more get 429."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest request body, bytes; more gets 413."""

    max_choices: int = Field(default=16, ge=1, le=256)
    """Largest `n` of a request."""

    max_conversations: int = Field(default=10_000, ge=0)
    """Conversations whose exact tokens are remembered, so that the next turn extends them."""

    max_conversation_tokens: int = Field(default=50_000_000, ge=0)
    """Tokens remembered over all conversations (4 bytes each)."""

    max_recent_feedback: int = Field(default=10_000, ge=0)
    """Feedback ids remembered to tell a retry from a clash."""


class TimeoutsConfig(Config):
    """How long the gateway waits for an engine, seconds."""

    connect_s: float = Field(default=2.0, gt=0)
    """To open a connection."""

    idle_s: float = Field(default=120.0, gt=0)
    """Between two chunks of an answer, the first included."""

    drain_s: float = Field(default=2.0, gt=0)
    """For the last chunk of an answer whose caller went away."""

    poll_s: float = Field(default=1.0, gt=0)
    """Between two looks at the health and the version of an engine."""

    store_s: float = Field(default=5.0, gt=0)
    """For the spool to take a feedback before it is acknowledged."""

    shutdown_s: float = Field(default=10.0, gt=0)
    """For running answers to end, and again for the spool to be shipped, when stopping."""


class SpoolConfig(Config):
    """The disk queue between the gateway and Kafka."""

    dir: str = ""
    """Folder of the segments; `{data_dir}/spool` when empty."""

    queue_events: int = Field(default=10_000, ge=1)
    """Events held in memory until the writer thread stored them; more are lost and counted."""

    queue_bytes: int = Field(default=128 * 2**20, ge=1024)
    """Bound on the same events, bytes."""

    max_bytes: int = Field(default=2 * 2**30, ge=64 * 1024)
    """Events on disk that Kafka has not taken, bytes; more are lost and counted."""

    segment_bytes: int = Field(default=16 * 2**20, ge=4096)
    """Size at which a segment file is closed and the next begun."""

    fsync_s: float = Field(default=1.0, ge=0)
    """Longest time between fsyncs; a process that dies loses nothing, a machine at most this."""

    retain_bytes: int = Field(default=256 * 2**20, ge=0)
    """Shipped segments kept for a broker that comes back empty, bytes."""

    retain_s: float = Field(default=86_400.0, ge=0)
    """Shipped segments kept for a broker that comes back empty, seconds."""

    ship_batch: int = Field(default=500, ge=1, le=10_000)
    """Events sent to Kafka before their acknowledgement is awaited."""

    ship_timeout_s: float = Field(default=10.0, gt=0)
    """For Kafka to acknowledge a batch, seconds; the batch is sent again after it."""

    topic_poll_s: float = Field(default=2.0, gt=0)
    """Between two looks at the topic ids while nothing is shipped, seconds."""

    max_event_bytes: int = Field(default=7 * 2**20, ge=1024)
    """Largest event, bytes; a larger one is lost and counted."""

    @model_validator(mode="after")
    def _a_segment_fits_the_spool(self) -> Self:
        if self.segment_bytes > self.max_bytes:
            raise ValueError(
                f"segment_bytes ({self.segment_bytes}) must not exceed max_bytes ({self.max_bytes})"
            )
        return self


class GatewayConfig(Config):
    """The process that speaks OpenAI's protocol, captures tokens and logs them."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""

    port: int = Field(default=8080, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""

    engines: tuple[str, ...] = Field(default=("http://127.0.0.1:8001",), min_length=1)
    """Base URLs of the vLLM replicas. Only this file names them: no request can add one."""

    api_keys: tuple[ApiKeyConfig, ...] = ()
    """Who may call. There is no default key: the gateway refuses to start without one."""

    tokenizer: str = ""
    """Folder with tokenizer and chat template; the policy's base model when empty."""

    max_model_len: int = Field(default=2048, ge=16)
    """Prompt and completion together, tokens; at most what the engines were started with."""

    sampling: SamplingDefaults = SamplingDefaults()
    """Sampling parameters of a request that does not name them."""

    limits: LimitsConfig = LimitsConfig()
    """Bounds on what one gateway process takes in."""

    timeouts: TimeoutsConfig = TimeoutsConfig()
    """How long the gateway waits for an engine."""

    spool: SpoolConfig = SpoolConfig()
    """The disk queue between the gateway and Kafka."""

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        for field in ("name", "sha256"):
            values = [getattr(key, field) for key in self.api_keys]
            if len(set(values)) != len(values):
                raise ValueError(f"api_keys: two keys share the same {field}")
        return self

    @model_validator(mode="after")
    def _engines_are_http_urls(self) -> Self:
        for url in self.engines:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engines: {url!r} is not an http:// or https:// address")
        return self
