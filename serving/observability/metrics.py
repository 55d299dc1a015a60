"""All metrics of the gateway; each group has its names and units in one file."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)

from onlinerl.serving.observability.answer_metrics import AnswerMetrics
from onlinerl.serving.observability.spool_metrics import ShippingMetrics, SpoolMetrics


def process_registry() -> CollectorRegistry:
    """A new registry that holds the process's memory, CPU time and garbage collections."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class GatewayMetrics:
    """The metrics of one gateway process, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.answers = AnswerMetrics(registry)
        self.spool = SpoolMetrics(registry)
        self.shipping = ShippingMetrics(registry)
        self.requests = Counter(
            "onlinerl_gateway_requests",
            "Requests answered, by path and status code.",
            ("path", "status"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "onlinerl_gateway_in_flight", "Requests being answered.", registry=registry
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
        self.withheld = Counter(
            "onlinerl_gateway_withheld",
            "Interactions and feedback that are not logged because consent is none.",
            registry=registry,
        )
        self.lost = Counter(
            "onlinerl_gateway_events_lost",
            "Events that were served but not logged, by reason.",
            ("reason",),
            registry=registry,
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
        self.replicas = Gauge(
            "onlinerl_gateway_replicas", "Engines that requests go to.", registry=registry
        )
