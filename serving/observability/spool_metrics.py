"""Metrics of events on their way to the event log."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class SpoolMetrics:
    """Metrics of what lies in memory and on disk, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.spooled = Counter(
            "onlinerl_gateway_events_spooled", "Events stored on disk.", registry=registry
        )
        self.waiting = Gauge(
            "onlinerl_gateway_spool_waiting_events",
            "Events in memory or on disk that the log has not taken.",
            registry=registry,
        )
        self.backlog_bytes = Gauge(
            "onlinerl_gateway_spool_backlog_bytes",
            "Events on disk that the log has not taken.",
            registry=registry,
        )
        self.write_failures = Counter(
            "onlinerl_gateway_spool_write_failures",
            "Times that the spool could not be written, e.g. because the disk is full.",
            registry=registry,
        )
        self.callback_failures = Counter(
            "onlinerl_gateway_spool_callback_failures",
            "Events that were stored, but whose caller could not be told.",
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


class ShippingMetrics:
    """Metrics of what is sent to the event log and looked up in the tables, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self.ship_failures = Counter(
            "onlinerl_gateway_ship_failures",
            "Batches that the log did not acknowledge and that are sent again.",
            registry=registry,
        )
        self.confirmations = Counter(
            "onlinerl_gateway_spool_confirmations",
            "Looks at how far the tables are, by outcome: `ok`, `failed`.",
            ("outcome",),
            registry=registry,
        )
