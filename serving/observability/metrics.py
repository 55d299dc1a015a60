"""What the gateway counts. Names, units and meanings in one place."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from onlinerl.serving.observability.version_labels import POLICY_VERSION, VersionLabels

MAX_VERSIONS = 16
"""Policy versions with series of their own."""
_FINE_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 5.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """The counters of one gateway process, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "onlinerl_gateway_requests",
            "Requests answered, by path and status code.",
            ("path", "status"),
            registry=registry,
        )
        self.answers = Counter(
            "onlinerl_gateway_answers",
            "Completions that ended, by finish reason.",
            ("finish_reason", POLICY_VERSION),
            registry=registry,
        )
        self.tokens = Counter(
            "onlinerl_gateway_tokens",
            "Tokens of served requests; kind is prompt or completion.",
            ("kind", POLICY_VERSION),
            registry=registry,
        )
        self.unparsed_calls = Counter(
            "onlinerl_gateway_unparsed_calls",
            "Answers whose calls the family's parser could not read; they are shown as text.",
            registry=registry,
        )
        self.untrainable = Counter(
            "onlinerl_gateway_untrainable",
            "Interactions that are logged but cannot be learned from.",
            registry=registry,
        )
        self.withheld = Counter(
            "onlinerl_gateway_withheld",
            "Interactions and feedback that are not logged because consent is none.",
            registry=registry,
        )
        self.extended = Counter(
            "onlinerl_gateway_extended",
            "Prompts with earlier turns, by whether they extend known tokens: yes or no.",
            ("known",),
            registry=registry,
        )
        self.lost = Counter(
            "onlinerl_gateway_events_lost",
            "Events that were served but not logged, by reason.",
            ("reason",),
            registry=registry,
        )
        self.in_flight = Gauge(
            "onlinerl_gateway_in_flight", "Requests being answered.", registry=registry
        )
        self.keys_fault = Gauge(
            "onlinerl_gateway_keys_fault",
            "1 while the keys file cannot be used and the keys are those of before.",
            registry=registry,
        )
        self.keys_failures = Counter(
            "onlinerl_gateway_keys_failures",
            "Attempts to read the keys file that failed.",
            registry=registry,
        )
        self.limited = Counter(
            "onlinerl_gateway_limited",
            "Requests refused with 429, by limit: in_flight, key_in_flight, requests or tokens.",
            ("limit",),
            registry=registry,
        )
        self.replayed = Counter(
            "onlinerl_gateway_replayed",
            "Requests answered with what an equal Idempotency-Key was answered before.",
            registry=registry,
        )
        self.ttft = Histogram(
            "onlinerl_gateway_ttft_seconds",
            "Arrival to first token.",
            (POLICY_VERSION,),
            buckets=_SECONDS,
            registry=registry,
        )
        self.latency = Histogram(
            "onlinerl_gateway_latency_seconds",
            "Arrival to last token.",
            (POLICY_VERSION,),
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "onlinerl_gateway_inter_token_seconds",
            "Mean time between two tokens of a completion; completions of one token do not count.",
            (POLICY_VERSION,),
            buckets=_FINE_SECONDS,
            registry=registry,
        )
        self.overhead = Histogram(
            "onlinerl_gateway_overhead_seconds",
            "Time of a request that was not spent waiting for the engine.",
            (POLICY_VERSION,),
            buckets=_FINE_SECONDS,
            registry=registry,
        )
        self.replicas = Gauge(
            "onlinerl_gateway_replicas", "Engines that requests go to.", registry=registry
        )
        self.spooled = Counter(
            "onlinerl_gateway_events_spooled", "Events stored on disk.", registry=registry
        )
        self.shipped = Counter(
            "onlinerl_gateway_events_shipped",
            "Events that the log acknowledged; one that is shipped again counts again.",
            registry=registry,
        )
        self.reshipped = Counter(
            "onlinerl_gateway_spool_rewinds",
            "Times that kept events were shipped again because the log came back empty.",
            registry=registry,
        )
        self.waiting = Gauge(
            "onlinerl_gateway_spool_waiting_events",
            "Events in memory or on disk that the log has not taken.",
            registry=registry,
        )
        self.write_failures = Counter(
            "onlinerl_gateway_spool_write_failures",
            "Times that the spool could not be written, e.g. because the disk is full.",
            registry=registry,
        )
        self.forgotten = Counter(
            "onlinerl_gateway_events_forgotten",
            "Events taken out of the spool because their user was erased.",
            registry=registry,
        )
        self.dropped_segments = Counter(
            "onlinerl_gateway_spool_dropped_segments",
            "Shipped segments that are no longer kept: `confirmed` by the tables, over a `bound`, "
            "or given up because of a `disk_full`.",
            ("reason",),
            registry=registry,
        )
        self.confirmations = Counter(
            "onlinerl_gateway_spool_confirmations",
            "Looks at how far the tables are, by outcome: `ok`, `failed`.",
            ("outcome",),
            registry=registry,
        )
        self.backlog_bytes = Gauge(
            "onlinerl_gateway_spool_backlog_bytes",
            "Events on disk that the log has not taken.",
            registry=registry,
        )
        self.ship_failures = Counter(
            "onlinerl_gateway_ship_failures",
            "Batches that the log did not acknowledge and that are sent again.",
            registry=registry,
        )
        self._versions = VersionLabels(
            counters=(self.answers, self.tokens),
            histograms=(self.ttft, self.latency, self.inter_token, self.overhead),
            max_versions=MAX_VERSIONS,
        )

    def count_answer(
        self,
        *,
        policy_version: str,
        num_prompt_tokens: int,
        choices: Iterable[tuple[str, int]],
    ) -> None:
        """Count an answer that has ended.

        Args:
            policy_version: what sampled its first token, as far as the engine told.
            num_prompt_tokens: tokens of its prompt.
            choices: finish reason and number of tokens of every completion.
        """
        version = self._versions.of(policy_version)
        self.tokens.labels("prompt", version).inc(num_prompt_tokens)
        for finish_reason, num_tokens in choices:
            self.tokens.labels("completion", version).inc(num_tokens)
            self.answers.labels(finish_reason, version).inc()

    def observe_times(
        self,
        *,
        policy_version: str,
        ttft_s: float | None,
        latency_s: float,
        num_tokens: int,
        overhead_s: float | None = None,
    ) -> None:
        """Note how long an answer took that had at least one token.

        Args:
            policy_version: what sampled its first token, as far as the engine told.
            ttft_s: arrival to first token; None for an answer that came whole.
            latency_s: arrival to last token.
            num_tokens: tokens of its longest completion.
            overhead_s: what of its time was not spent waiting for the engine; None if not known.
        """
        version = self._versions.of(policy_version)
        self.latency.labels(version).observe(latency_s)
        if ttft_s is not None:
            self.ttft.labels(version).observe(ttft_s)
        if ttft_s is not None and num_tokens > 1:
            self.inter_token.labels(version).observe((latency_s - ttft_s) / (num_tokens - 1))
        if overhead_s is not None:
            self.overhead.labels(version).observe(max(overhead_s, 0.0))
