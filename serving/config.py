"""Configuration of the gateway. Imports neither aiohttp, Kafka nor a tokenizer."""

import re
from typing import Self

from pydantic import Field, model_validator

from onlinerl.base_config import Config
from onlinerl.rollout_store.schema import Consent


class KeyLimits(Config):
    """Limits of one API key in one gateway process; keys default to `limits.per_key`."""

    max_in_flight: int | None = Field(default=None, ge=1, le=100_000)
    """Largest number of requests of the key at once; more get 429."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Largest average rate of requests; as many may come at once after a quiet minute."""

    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Largest average rate of prompt and completion tokens; as many may come at once after a quiet
    minute."""


class ApiKeyConfig(Config):
    """One API key, with its rights. Files hold the SHA-256 of a key, never the key itself."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[^\p{Cc}\p{Zl}\p{Zp}]+$")
    """Name of the key in logs and metrics: one line, without control characters."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the key in lower-case hexadecimal: `printf %s KEY | sha256sum`."""

    tenant: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """Tenant of the key. Tenants share neither prefix cache nor conversations nor feedback."""

    consent: Consent = "log"
    """How the traffic of this key may be used; a request can only narrow it."""

    policies: tuple[str, ...] = ()
    """Policies that the key may use; all of them when empty."""

    limits: KeyLimits = KeyLimits()
    """Limits of this key, where they differ from `limits.per_key`."""


class SamplingDefaults(Config):
    """Sampling parameters for requests that do not name them."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divisor of the logits. 0 is greedy decoding, which is served but not trained on."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of tokens of a completion; the rest of the context when absent."""


class LimitsConfig(Config):
    """Limits of one gateway process."""

    max_in_flight: int = Field(default=256, ge=1, le=100_000)
    """Largest number of requests at once; more get 429."""

    per_key: KeyLimits = KeyLimits()
    """Limits of keys that have none of their own; there is no limit where one is absent."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest request body in bytes; a larger one gets 413."""

    max_head_bytes: int = Field(default=64 * 2**10, ge=1024)
    """Largest size of request line and headers in bytes; larger ones get 400."""

    max_choices: int = Field(default=16, ge=1, le=256)
    """Largest `n`, the number of choices, of a request."""

    max_conversations: int = Field(default=10_000, ge=0)
    """Number of conversations whose exact tokens are remembered, so that the next turn extends
    them."""

    max_conversation_tokens: int = Field(default=50_000_000, ge=0)
    """Number of tokens remembered over all conversations, 4 bytes each."""

    max_recent_feedback: int = Field(default=10_000, ge=0)
    """Number of feedback ids remembered, to tell a retry from other feedback with the same id."""


class IdempotencyConfig(Config):
    """Responses kept in memory for callers that repeat a request with its `Idempotency-Key`."""

    max_entries: int = Field(default=10_000, ge=0)
    """Number of responses kept; the oldest is dropped first. 0 refuses the header."""

    max_bytes: int = Field(default=64 * 2**20, ge=0)
    """Size of all kept bodies and headers in bytes."""

    ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds for which a response is kept."""

    wait_s: float = Field(default=120.0, gt=0)
    """Seconds that a repeated request waits for the first one to be answered; then it gets 409."""


class TlsConfig(Config):
    """HTTPS instead of HTTP. The files are PEM and are read once, at startup."""

    cert: str = ""
    """File with the certificate of the gateway, followed by its intermediates; plain HTTP when
    empty."""

    key: str = ""
    """File with the private key of `cert`, without a passphrase."""

    client_ca: str = ""
    """File with certificates of authorities; only callers with a certificate of theirs can connect.
    Empty asks for no certificates."""

    @model_validator(mode="after")
    def _cert_and_key_come_together(self) -> Self:
        if bool(self.cert) != bool(self.key):
            raise ValueError("tls: give both cert and key, or neither")
        if self.client_ca and not self.cert:
            raise ValueError("tls: client_ca needs cert and key")
        return self


class CorsConfig(Config):
    """Web pages that may call the gateway from a browser; none by default."""

    origins: tuple[str, ...] = ()
    """Allowed origins, e.g. `https://app.example.com`, or `*` for every page."""

    allow_credentials: bool = False
    """Whether browsers may send cookies and logins; not possible with the origin `*`."""

    max_age_s: int = Field(default=600, ge=0)
    """Seconds for which a browser may remember that an origin is allowed."""

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
    """OpenTelemetry traces, sent over OTLP/HTTP. Spans hold no content."""

    enabled: bool = False
    """Whether requests are traced; the SDK is not imported otherwise."""

    endpoint: str = Field(default="http://127.0.0.1:4318/v1/traces", pattern=r"^https?://")
    """URL that spans are sent to."""

    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of traces that are kept; a caller that started a trace decides about it."""

    max_queue_spans: int = Field(default=2048, ge=1)
    """Largest number of spans waiting to be sent; more are dropped."""

    export_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds to wait for the collector to accept a batch; then the batch is dropped."""


class TimeoutsConfig(Config):
    """Timeouts and intervals of the gateway, in seconds."""

    receive_s: float = Field(default=30.0, gt=0)
    """Seconds that a caller gets to send the head of a request, and again for its body."""

    connect_s: float = Field(default=2.0, gt=0)
    """Seconds to wait for a connection to an engine."""

    idle_s: float = Field(default=120.0, gt=0)
    """Seconds to wait for the next chunk of a streamed answer, the first included."""

    whole_s: float = Field(default=600.0, gt=0)
    """Seconds to wait for an answer that is not streamed."""

    drain_s: float = Field(default=2.0, gt=0)
    """Seconds to wait for the last chunk of an answer whose caller disconnected."""

    poll_s: float = Field(default=1.0, gt=0)
    """Seconds between two checks of the health and version of an engine."""

    store_s: float = Field(default=5.0, gt=0)
    """Seconds to wait for the spool to store feedback, which is acknowledged after that."""

    ready_grace_s: float = Field(default=0.0, ge=0)
    """Seconds, at shutdown, between reporting not ready and closing the port, for load balancers to
    notice."""

    shutdown_s: float = Field(default=10.0, gt=0)
    """Seconds, at shutdown, for running answers to end, and again for the spool to be shipped."""


class RoutingConfig(Config):
    """The choice of a replica for a request, and the ejection of replicas that fail."""

    eject_after: int = Field(default=3, ge=1, le=100)
    """Number of health checks in a row that time out before a replica is ejected: it gets no more
    requests. A refused connection ejects at once, and a broken answer counts as two."""

    return_after: int = Field(default=2, ge=1, le=100)
    """Number of good health checks in a row before an ejected replica gets requests again; one is
    enough when no other replica serves."""

    load_factor: float = Field(default=1.5, ge=1)
    """Load at which a session leaves the replica that has its prefix cached for the least busy one:
    this many times the mean number of running completions, plus `load_slack`."""

    load_slack: int = Field(default=8, ge=0)
    """Number of completions that a replica may run above `load_factor` times the mean."""

    max_sessions: int = Field(default=100_000, ge=0)
    """Number of sessions whose replica is remembered; others are placed by a hash of their id."""

    max_continuations: int = Field(default=3, ge=0, le=100)
    """Number of times that an answer is continued after an engine aborted it."""


class ArmsConfig(Config):
    """Canary and shadow: versions that get a part of the traffic, set by the deploy controller."""

    poll_s: float = Field(default=3.0, gt=0)
    """Seconds between two reads of the table of arms."""

    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds to wait for a read of the table; then the last known arms stay."""

    max_shadows: int = Field(default=8, ge=0)
    """Largest number of requests that shadows answer at once; more get no shadow answer."""

    shadow_load: float = Field(default=0.5, ge=0, le=1)
    """Share of `limits.max_in_flight` in use above which no request gets a shadow answer."""

    shadow_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds to wait for the answer of a shadow; then it is dropped."""


class SpoolConfig(Config):
    """The disk queue between the gateway and Kafka."""

    dir: str = ""
    """Folder of the segment files; `{data_dir}/spool` when empty."""

    queue_events: int = Field(default=10_000, ge=1)
    """Largest number of events in memory that the writer thread has not stored; more are lost and
    counted."""

    queue_bytes: int = Field(default=128 * 2**20, ge=1024)
    """Largest size of these events in bytes; more are lost and counted."""

    max_bytes: int = Field(default=2 * 2**30, ge=64 * 1024)
    """Largest size, in bytes, of the events on disk that Kafka has not accepted; more are lost and
    counted."""

    segment_bytes: int = Field(default=16 * 2**20, ge=4096)
    """Size in bytes at which a segment file is closed and the next one started."""

    gather_s: float = Field(default=0.01, ge=0, le=1)
    """Seconds that an event may wait in memory for others to be written with it. Feedback, whose
    caller waits for the acknowledgement, is written at once."""

    fsync_s: float = Field(default=1.0, ge=0)
    """Longest time between two fsyncs in seconds. A process that dies loses no events, a machine
    that crashes loses those of this time."""

    retain_bytes: int = Field(default=256 * 2**20, ge=0)
    """Largest size, in bytes, of shipped segments that are kept until the tables hold their events.
    They are sent again if the broker loses its data."""

    retain_s: float = Field(default=86_400.0, ge=0)
    """Longest time that shipped segments are kept, in seconds."""

    confirm_s: float = Field(default=60.0, gt=0)
    """Seconds between two checks of which events the tables hold."""

    ship_linger_s: float = Field(default=0.1, ge=0, le=10)
    """Pause in seconds after a batch that was not full, so that the next one is larger."""

    ship_batch: int = Field(default=500, ge=1, le=10_000)
    """Largest number of events in a batch, which Kafka acknowledges before the next is sent."""

    ship_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds to wait for Kafka to acknowledge a batch; then the batch is sent again."""

    topic_poll_s: float = Field(default=2.0, gt=0)
    """Seconds between two checks of the topic ids while nothing is shipped."""

    max_event_bytes: int = Field(default=7 * 2**20, ge=1024)
    """Largest event in bytes; a larger one is lost and counted."""

    @model_validator(mode="after")
    def _a_segment_fits_the_spool(self) -> Self:
        if self.segment_bytes > self.max_bytes:
            raise ValueError(
                f"segment_bytes ({self.segment_bytes}) must not exceed max_bytes ({self.max_bytes})"
            )
        return self


class ResponsesConfig(Config):
    """Responses that `/v1/responses` stores, so that `previous_response_id` can continue them."""

    path: str = ""
    """SQLite file, private to the gateway's user; `{data_dir}/responses.sqlite` when empty."""

    max_rows: int = Field(default=100_000, ge=0)
    """Number of responses stored; the oldest is dropped first. 0 stores none."""

    max_bytes: int = Field(default=2**30, ge=0)
    """Size of all stored inputs and outputs in bytes; the oldest is dropped first."""

    retain_s: float = Field(default=30 * 86_400.0, gt=0)
    """Seconds for which a response is stored."""

    max_waiting: int = Field(default=1000, ge=1)
    """Largest number of reads, and of writes, that wait for the file; more fail at once."""


class GatewayConfig(Config):
    """The process that serves clients and logs every token."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""

    port: int = Field(default=8080, ge=0, le=65_535)
    """Port to listen on; 0 takes a free one."""

    engines: tuple[str, ...] = Field(default=("http://127.0.0.1:8001",), min_length=1)
    """Base URLs of the vLLM replicas; no request can add one."""

    api_keys: tuple[ApiKeyConfig, ...] = ()
    """Keys of the callers. There is no default key, and the gateway does not start without one."""

    keys_file: str = ""
    """File with more keys, written by `onlinerl keys`; `{data_dir}/keys.json` when empty."""

    keys_poll_s: float = Field(default=1.0, gt=0)
    """Seconds between two checks of `keys_file` for changes."""

    tokenizer: str = ""
    """Folder or Hugging Face id of the tokenizer and chat template; those of the base model when
    empty."""

    renderer: str = Field(default="auto", min_length=1)
    """Renderer that turns messages into tokens: `auto`, `chatml`, `chat_template` or a model
    family."""

    max_model_len: int = Field(default=2048, ge=16)
    """Largest number of tokens of prompt and completion; at most `max_model_len` of the engines."""

    sampling: SamplingDefaults = SamplingDefaults()
    """Sampling parameters for requests that do not name them."""

    limits: LimitsConfig = LimitsConfig()
    """Limits of one gateway process."""

    idempotency: IdempotencyConfig = IdempotencyConfig()
    """Responses kept for callers that repeat a request with its `Idempotency-Key`."""

    tls: TlsConfig = TlsConfig()
    """HTTPS instead of HTTP."""

    cors: CorsConfig = CorsConfig()
    """Web pages that may call the gateway from a browser."""

    tracing: TracingConfig = TracingConfig()
    """OpenTelemetry traces."""

    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Timeouts and intervals."""

    routing: RoutingConfig = RoutingConfig()
    """The choice of a replica, and the ejection of replicas that fail."""

    arms: ArmsConfig = ArmsConfig()
    """Versions that get a part of the traffic."""

    spool: SpoolConfig = SpoolConfig()
    """The disk queue between the gateway and Kafka."""

    responses: ResponsesConfig = ResponsesConfig()
    """Responses that `/v1/responses` stores."""

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
