"""`Tracing` over OpenTelemetry: W3C context in and out, spans sent by a thread of the SDK.

Importing this module imports the SDK. Attributes are ids, counts and names of ours, never an
unknown path, a body, a key or an error message.
"""

import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from onlinerl import __version__
from onlinerl.serving.config import TracingConfig
from onlinerl.serving.interaction.engine import Chunk, Engine, Generate
from onlinerl.serving.observability.tracing import Tracing

_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_BATCH = 512
_DELAY_MS = 1000.0
_OWN_HEADERS = {
    b"x-onlinerl-interaction-id": "onlinerl.interaction_id",
    b"x-onlinerl-session-id": "onlinerl.session_id",
    b"x-onlinerl-policy-version": "onlinerl.policy_version",
}
"""Response headers that become attributes of the span."""


class OpenTelemetryTracing(Tracing):
    """Tracing whose spans go to `processor`, which has a bounded queue and never blocks."""

    def __init__(self, processor: SpanProcessor, *, sample_ratio: float) -> None:
        # The SDK would warn for every span that a full queue drops; its own counter counts them.
        logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.ERROR)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(
                {"service.name": "onlinerl-gateway", "service.version": __version__}
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("onlinerl.gateway", __version__)

    @classmethod
    def exporting(cls, config: TracingConfig) -> Self:
        """Tracing that sends spans to `config.endpoint` over OTLP/HTTP."""
        exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=config.export_timeout_s)
        processor = BatchSpanProcessor(
            exporter,
            max_queue_size=config.max_queue_spans,
            schedule_delay_millis=_DELAY_MS,
            max_export_batch_size=min(_MAX_BATCH, config.max_queue_spans),
        )
        return cls(processor, sample_ratio=config.sample_ratio)

    @override
    def app(self, app: ASGIApp) -> ASGIApp:
        return TracedApp(app, self._tracer)

    @override
    def engine(self, engine: Engine) -> Engine:
        return TracedEngine(engine, self._tracer)

    @override
    def close(self, *, timeout_s: float) -> None:
        # The SDK waits up to 30 s for a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)


class TracedApp:
    """Makes a server span of every request, below the caller's span if it sent a `traceparent`."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve within a span."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = _PROPAGATOR.extract(_trace_headers(scope))
        span = self._tracer.start_span(
            scope["method"],
            context=context,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"]},
        )

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                _note_start(span, message)
            await send(message)

        with use_span(
            span, end_on_exit=True, record_exception=False, set_status_on_exception=False
        ):
            try:
                await self._app(scope, receive, noting_send)
            finally:
                _name(span, scope)


class TracedEngine(Engine):
    """Makes a client span of every answer, from the call to the last chunk."""

    def __init__(self, engine: Engine, tracer: Tracer) -> None:
        self._engine = engine
        self._tracer = tracer

    @property
    @override
    def url(self) -> str:
        return self._engine.url

    @override
    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Stream a completion within a span, whose context goes to the engine."""
        span = self._tracer.start_span(
            "generate",
            kind=SpanKind.CLIENT,
            attributes={
                "server.address": self._engine.url,
                "onlinerl.request_id": request.request_id,
                "gen_ai.usage.input_tokens": len(request.token_ids),
            },
        )
        headers = dict(request.headers)
        _PROPAGATOR.inject(headers, context=set_span_in_context(span))
        num_tokens = 0
        try:
            async with aclosing(self._engine.generate(replace(request, headers=headers))) as chunks:
                async for chunk in chunks:
                    num_tokens += len(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        span.set_attribute("onlinerl.finish_reason", chunk.finish_reason)
                    yield chunk
        except Exception as error:
            # Only the type of the error: its message may quote the request.
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
            span.end()

    @override
    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    @override
    async def weight_version(self) -> str:
        return await self._engine.weight_version()

    @override
    async def adapters(self) -> frozenset[str]:
        return await self._engine.adapters()


def _trace_headers(scope: Scope) -> dict[str, str]:
    headers = Headers(scope=scope)
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def _note_start(span: Span, message: Message) -> None:
    status = message["status"]
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    for name, value in message.get("headers", ()):
        if name in _OWN_HEADERS:
            span.set_attribute(_OWN_HEADERS[name], value.decode("latin-1"))


def _name(span: Span, scope: Scope) -> None:
    """Name the span after its route, which is known once it matched; other paths stay out."""
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.set_attribute("http.route", route)
        span.update_name(f"{scope['method']} {route}")
