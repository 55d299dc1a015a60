"""What the gateway counts. Names, units and meanings in one place."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
            ("finish_reason",),
            registry=registry,
        )
        self.tokens = Counter(
            "onlinerl_gateway_tokens",
            "Tokens of served requests; kind is prompt or completion.",
            ("kind",),
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
        self.ttft = Histogram(
            "onlinerl_gateway_ttft_seconds",
            "Arrival to first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.latency = Histogram(
            "onlinerl_gateway_latency_seconds",
            "Arrival to last token.",
            buckets=_SECONDS,
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
