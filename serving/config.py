"""What the gateway can be told. Imports neither aiohttp, Kafka nor a tokenizer."""

import re
from typing import Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config
from onlinerl.rollout_store.schema import Consent


class KeyLimits(Config):
    """What one API key may take of one gateway process; None leaves it to `limits.per_key`."""

    max_in_flight: int | None = Field(default=None, ge=1, le=100_000)
    """Requests of the key being answered at once; more get 429."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests, on average; as many may come at once after a quiet minute."""

    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and completion tokens, on average; as many may come at once after a quiet minute."""


class ApiKeyConfig(Config):
    """A caller: the key itself is never in a file, only its SHA-256."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[^\p{Cc}\p{Zl}\p{Zp}]+$")
    """How logs and metrics call this key: one line, without control characters."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Lower-case hexadecimal SHA-256 of the key: `printf %s KEY | sha256sum`."""

    tenant: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Prefix cache, conversations and feedback are kept apart by tenant."""

    consent: Consent = "log"
    """What may be done with this key's traffic; a request can only narrow it."""

    policies: tuple[str, ...] = ()
    """Policies that the key may ask; every one when empty."""

    limits: KeyLimits = KeyLimits()
    """Bounds of this key, where they differ from `limits.per_key`."""


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

    per_key: KeyLimits = KeyLimits()
    """Bounds of every key that does not say otherwise; None is no bound of its own."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest request body, bytes; more gets 413."""

    max_head_bytes: int = Field(default=64 * 2**10, ge=1024)
    """Largest request line and headers, bytes; more gets 400."""

    max_choices: int = Field(default=16, ge=1, le=256)
    """Largest `n` of a request."""

    max_conversations: int = Field(default=10_000, ge=0)
    """Conversations whose exact tokens are remembered, so that the next turn extends them."""

    max_conversation_tokens: int = Field(default=50_000_000, ge=0)
    """Tokens remembered over all conversations (4 bytes each)."""

    max_recent_feedback: int = Field(default=10_000, ge=0)
    """Feedback ids remembered to tell a retry from a clash."""


class IdempotencyConfig(Config):
    """Answers kept in memory for callers that ask again with the same `Idempotency-Key`."""

    max_entries: int = Field(default=10_000, ge=0)
    """Answers kept; the oldest goes first. 0 refuses the header."""

    max_bytes: int = Field(default=64 * 2**20, ge=0)
    """Their bodies and headers together, bytes."""

    ttl_s: float = Field(default=3600.0, gt=0)
    """How long an answer is kept, seconds."""

    wait_s: float = Field(default=120.0, gt=0)
    """How long a second request waits for the first to be answered, seconds; then it gets 409."""


class TlsConfig(Config):
    """HTTPS in place of HTTP. Files are PEM, read once at start."""

    cert: str = ""
    """Certificate of the gateway followed by its intermediates; plain HTTP when empty."""

    key: str = ""
    """Private key of `cert`, without a passphrase."""

    client_ca: str = ""
    """Certificates of authorities; when given, only callers with one of theirs connect."""

    @model_validator(mode="after")
    def _cert_and_key_come_together(self) -> Self:
        if bool(self.cert) != bool(self.key):
            raise ValueError("tls: give both cert and key, or neither")
        if self.client_ca and not self.cert:
            raise ValueError("tls: client_ca needs cert and key")
        return self


class CorsConfig(Config):
    """Which web pages may call the gateway from a browser; none by default."""

    origins: tuple[str, ...] = ()
    """Allowed origins, e.g. `https://app.example.com`, or `*` for every page."""

    allow_credentials: bool = False
    """Whether cookies and browser logins are sent along; not with the origin `*`."""

    max_age_s: int = Field(default=600, ge=0)
    """How long a browser may remember that an origin is allowed, seconds."""

    @model_validator(mode="after")
    def _credentials_need_named_origins(self) -> Self:
        if self.allow_credentials and "*" in self.origins:
            raise ValueError("cors: allow_credentials needs named origins, not *")
        return self

    @model_validator(mode="after")
    def _origins_are_origins(self) -> Self:
        for origin in self.origins:
            if origin != "*" and re.fullmatch(r"https?://[^/?#\s*]+", origin) is None:
                raise ValueError(
                    f"cors: {origin!r} is no origin: give scheme and host without a path, "
                    "e.g. https://app.example.com"
                )
        return self


class TracingConfig(Config):
    """OpenTelemetry traces, sent over OTLP/HTTP. No span holds content."""

    enabled: bool = False
    """Whether requests are traced; the SDK is not imported otherwise."""

    endpoint: str = Field(default="http://127.0.0.1:4318/v1/traces", pattern=r"^https?://")
    """Where spans are sent."""

    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the traces begun here that are kept; a caller's own decision is followed."""

    max_queue_spans: int = Field(default=2048, ge=1)
    """Spans waiting to be sent; more are dropped."""

    export_timeout_s: float = Field(default=5.0, gt=0)
    """For the collector to take a batch, seconds; the batch is dropped after it."""


class TimeoutsConfig(Config):
    """How long the gateway waits for engines, callers and its own parts, seconds."""

    receive_s: float = Field(default=30.0, gt=0)
    """For a caller to send the head of a request, and again its body, which holds a place."""

    connect_s: float = Field(default=2.0, gt=0)
    """To open a connection."""

    idle_s: float = Field(default=120.0, gt=0)
    """Between two chunks of an answer, the first included."""

    whole_s: float = Field(default=600.0, gt=0)
    """For an answer that does not stream: the engine then sends it whole."""

    drain_s: float = Field(default=2.0, gt=0)
    """For the last chunk of an answer whose caller went away."""

    poll_s: float = Field(default=1.0, gt=0)
    """Between two looks at the health and the version of an engine."""

    store_s: float = Field(default=5.0, gt=0)
    """For the spool to take a feedback before it is acknowledged."""

    ready_grace_s: float = Field(default=0.0, ge=0)
    """Between not being ready and not listening, when stopping: so that load balancers see it."""

    shutdown_s: float = Field(default=10.0, gt=0)
    """For running answers to end, and again for the spool to be shipped, when stopping."""


class RoutingConfig(Config):
    """Which replica a request goes to, and when one that fails is left alone."""

    eject_after: int = Field(default=3, ge=1, le=100)
    """Health checks in a row that came too late before a replica gets no more requests. A refused
    connection ejects at once, and a broken answer counts as two."""

    return_after: int = Field(default=2, ge=1, le=100)
    """Good health checks in a row before an ejected replica gets requests again; one is enough when
    no other serves."""

    load_factor: float = Field(default=1.5, ge=1)
    """A session leaves the replica that holds its prefix for the least busy one when its replica
    runs more than this many times the mean, and `load_slack` completions more."""

    load_slack: int = Field(default=8, ge=0)
    """Completions that a replica may run over `load_factor` times the mean."""

    max_sessions: int = Field(default=100_000, ge=0)
    """Sessions whose replica is remembered; others are placed by a hash of their id."""

    max_continuations: int = Field(default=3, ge=0, le=100)
    """How often an answer that an engine aborted by itself is taken up again."""


class ArmsConfig(Config):
    """Canary and shadow: versions that take part of the traffic, as the deploy controller says."""

    poll_s: float = Field(default=3.0, gt=0)
    """Between two looks at the table of arms, seconds."""

    timeout_s: float = Field(default=10.0, gt=0)
    """For the table to be read, seconds; the last known arms hold after it."""

    max_shadows: int = Field(default=8, ge=0)
    """Requests being answered by a shadow at once; more are not answered a second time."""

    shadow_load: float = Field(default=0.5, ge=0, le=1)
    """Share of `limits.max_in_flight` from which on no request is answered a second time."""

    shadow_timeout_s: float = Field(default=120.0, gt=0)
    """For a shadow to answer, seconds; its answer is dropped after it."""


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

    gather_s: float = Field(default=0.01, ge=0, le=1)
    """How long an event may wait in memory for others that are written with it; one whose caller
    waits for its acknowledgement (feedback) is written at once."""

    fsync_s: float = Field(default=1.0, ge=0)
    """Longest time between fsyncs; a process that dies loses nothing, a machine at most this."""

    retain_bytes: int = Field(default=256 * 2**20, ge=0)
    """Shipped segments kept for a broker that comes back empty, bytes; those that the tables hold
    are not kept."""

    retain_s: float = Field(default=86_400.0, ge=0)
    """How long they are kept at most, seconds."""

    confirm_s: float = Field(default=60.0, gt=0)
    """Between two looks at how far the tables are, seconds."""

    ship_linger_s: float = Field(default=0.1, ge=0, le=10)
    """Pause after a batch that was not full, so that the next one is larger."""

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


class ResponsesConfig(Config):
    """Answers that `/v1/responses` keeps, so that `previous_response_id` goes on from them."""

    path: str = ""
    """SQLite file that only the gateway's user reads; `{data_dir}/responses.sqlite` when empty."""

    max_rows: int = Field(default=100_000, ge=0)
    """Answers kept; the oldest goes first. 0 keeps none."""

    max_bytes: int = Field(default=2**30, ge=0)
    """Their input and output together, bytes; the oldest goes first."""

    retain_s: float = Field(default=30 * 86_400.0, gt=0)
    """How long an answer is kept, seconds."""

    max_waiting: int = Field(default=1000, ge=1)
    """Reads, and as many writes, that wait for the file; more fail at once."""


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

    keys_file: str = ""
    """More keys, in a file of `onlinerl keys`; `{data_dir}/keys.json` when empty."""

    keys_poll_s: float = Field(default=1.0, gt=0)
    """Between two looks at `keys_file` of a running gateway, seconds."""

    tokenizer: str = ""
    """Folder with tokenizer and chat template; the policy's base model when empty."""

    renderer: str = Field(default="auto", min_length=1)
    """What turns messages into tokens: `auto`, `chatml`, `chat_template` or a model family."""

    max_model_len: int = Field(default=2048, ge=16)
    """Prompt and completion together, tokens; at most what the engines were started with."""

    sampling: SamplingDefaults = SamplingDefaults()
    """Sampling parameters of a request that does not name them."""

    limits: LimitsConfig = LimitsConfig()
    """Bounds on what one gateway process takes in."""

    idempotency: IdempotencyConfig = IdempotencyConfig()
    """Answers kept for callers that ask again with the same `Idempotency-Key`."""

    tls: TlsConfig = TlsConfig()
    """HTTPS in place of HTTP."""

    cors: CorsConfig = CorsConfig()
    """Which web pages may call the gateway from a browser."""

    tracing: TracingConfig = TracingConfig()
    """OpenTelemetry traces."""

    timeouts: TimeoutsConfig = TimeoutsConfig()
    """How long the gateway waits for engines, callers and its own parts."""

    routing: RoutingConfig = RoutingConfig()
    """Which replica a request goes to, and when one that fails is left alone."""

    arms: ArmsConfig = ArmsConfig()
    """Versions that take part of the traffic."""

    spool: SpoolConfig = SpoolConfig()
    """The disk queue between the gateway and Kafka."""

    responses: ResponsesConfig = ResponsesConfig()
    """Answers that `/v1/responses` keeps."""

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
