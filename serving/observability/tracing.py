"""Traces: one span per request, one per call to an engine, never a word of content.

`open_tracing` gives the form that the configuration asks for; the OpenTelemetry SDK is imported
only when it asks for traces.
"""

from typing import Protocol

from starlette.types import ASGIApp

from onlinerl.serving.config import TracingConfig
from onlinerl.serving.interaction.engine import Engine


class Tracing(Protocol):
    """What is put around the application and around every engine."""

    def app(self, app: ASGIApp) -> ASGIApp:
        """An application that makes a span of every request."""

    def engine(self, engine: Engine) -> Engine:
        """An engine that makes a span of every answer and tells the engine about it."""

    def close(self, *, timeout_s: float) -> None:
        """Send what is waiting, within `timeout_s`."""


class NoTracing:
    """Changes nothing."""

    def app(self, app: ASGIApp) -> ASGIApp:
        """The application itself."""
        return app

    def engine(self, engine: Engine) -> Engine:
        """The engine itself."""
        return engine

    def close(self, *, timeout_s: float) -> None:
        """Nothing waits."""


def open_tracing(config: TracingConfig) -> Tracing:
    """Tracing as configured."""
    if not config.enabled:
        return NoTracing()
    from onlinerl.serving.observability.opentelemetry import OpenTelemetryTracing

    return OpenTelemetryTracing.exporting(config)
