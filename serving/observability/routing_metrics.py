"""Metrics of routing: replicas, arms and shadows."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class ReplicaMetrics:
    """Metrics of replicas, in `registry`; the label `engine` is the address of a replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ready = Gauge(
            "onlinerl_gateway_replica_ready",
            "Whether requests go to a replica: 1 or 0.",
            ("engine",),
            registry=registry,
        )
        self.running = Gauge(
            "onlinerl_gateway_replica_running",
            "Completions that a replica samples for this gateway.",
            ("engine",),
            registry=registry,
        )
        self.ejections = Counter(
            "onlinerl_gateway_replica_ejections",
            "Times that a replica left because it failed.",
            ("engine",),
            registry=registry,
        )
        self.failures = Counter(
            "onlinerl_gateway_replica_failures",
            "Failed calls of a replica; kind is look or request.",
            ("engine", "kind"),
            registry=registry,
        )
        self.routed = Counter(
            "onlinerl_gateway_routed",
            "Requests given to a replica, by why: session, spill or least_load.",
            ("engine", "by"),
            registry=registry,
        )
        self.failovers = Counter(
            "onlinerl_gateway_failovers",
            "Completions that went on to another replica before their first token, by the one that"
            " failed.",
            ("engine",),
            registry=registry,
        )
        self.continued = Counter(
            "onlinerl_gateway_continued",
            "Completions that an engine aborted by itself and that were taken up again.",
            registry=registry,
        )


class ArmMetrics:
    """Metrics of arms and of shadow answers, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "onlinerl_gateway_arm_requests",
            "Requests by the arm that they were given to.",
            ("arm",),
            registry=registry,
        )
        self.fallbacks = Counter(
            "onlinerl_gateway_arm_fallbacks",
            "Requests that another arm took because no replica of their own was ready, by the arm"
            " that they were drawn for.",
            ("arm",),
            registry=registry,
        )
        self.shadows = Counter(
            "onlinerl_gateway_shadows",
            "Requests drawn for a shadow: logged, failed, or dropped by reason.",
            ("outcome",),
            registry=registry,
        )
        self.reads = Counter(
            "onlinerl_gateway_arms_reads",
            "Looks at the table of arms: ok, failed or late; the last known hold after a failed"
            " one.",
            ("outcome",),
            registry=registry,
        )
        self.read_at = Gauge(
            "onlinerl_gateway_arms_read_timestamp_seconds",
            "When the table of arms was read last, Unix time.",
            registry=registry,
        )


class RoutingMetrics:
    """The metrics of one router, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.replicas = ReplicaMetrics(registry)
        self.arms = ArmMetrics(registry)
        self.faults = Counter(
            "onlinerl_gateway_routing_faults",
            "Unexpected errors of the loop that looks at `replicas` or `arms`.",
            ("loop",),
            registry=registry,
        )
