"""Traces: one span per request and one per call to an engine, without any content.

`open_tracing` gives the form that is configured. The OpenTelemetry SDK is only imported when traces
are enabled.
"""

from typing import Protocol

from starlette.types import ASGIApp
from typing_extensions import override

from onlinerl.serving.config import TracingConfig
from onlinerl.serving.interaction.engine import Engine


class Tracing(Protocol):
    """Wraps the application and every engine."""

    def app(self, app: ASGIApp) -> ASGIApp:
        """An application that makes a span of every request."""

    def engine(self, engine: Engine) -> Engine:
        """An engine that makes a span of every answer and sends its context to the engine."""

    def close(self, *, timeout_s: float) -> None:
        """Send the waiting spans; give up after `timeout_s` seconds."""


class NoTracing(Tracing):
    """Wraps nothing."""

    @override
    def app(self, app: ASGIApp) -> ASGIApp:
        return app

    @override
    def engine(self, engine: Engine) -> Engine:
        return engine

    @override
    def close(self, *, timeout_s: float) -> None:
        return


def open_tracing(config: TracingConfig) -> Tracing:
    """The configured form of tracing."""
    if not config.enabled:
        return NoTracing()
    from onlinerl.serving.observability.opentelemetry import OpenTelemetryTracing

    return OpenTelemetryTracing.exporting(config)
