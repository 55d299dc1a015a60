"""Traces say who asked whom and for how long, and nothing of what was said."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.types import ASGIApp

from onlinerl.errors import EngineRefused
from onlinerl.serving.config import TracingConfig
from onlinerl.serving.observability.opentelemetry import OpenTelemetryTracing
from onlinerl.serving.observability.tracing import NoTracing, open_tracing
from onlinerl.serving.rendering.protocol import Renderer
from tests.serving.world import KEY, Caller, World, body, make_world

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}
SECRET = "canary-7c1f"


class Traced:
    """A gateway whose spans are kept."""

    def __init__(self, world: World, *, sample_ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.world = world
        tracing = OpenTelemetryTracing(
            SimpleSpanProcessor(self.exporter), sample_ratio=sample_ratio
        )
        for replica in world.gateway.pool.replicas:
            replica.engine = tracing.engine(replica.engine)
        self.app: ASGIApp = tracing.app(world.app)

    async def ask(self, json_body: object = None, **options: Any) -> Caller:
        options.setdefault("json_body", body() if json_body is None else json_body)
        caller = await Caller(self.app, **options).done()  # type: ignore[arg-type]
        await self.world.ended()
        return caller

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def of(self, kind: SpanKind) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.kind is kind]
        return span


@pytest.fixture
async def traced(renderer: Renderer) -> Traced:
    world = make_world(renderer)
    await world.gateway.pool.look(world.gateway.pool.replicas[0])
    return Traced(world)


async def test_a_request_is_a_span_and_the_engine_s_part_its_child(traced: Traced) -> None:
    await traced.ask(body(stream=True))
    server, client = traced.of(SpanKind.SERVER), traced.of(SpanKind.CLIENT)
    (event,) = traced.world.interactions

    assert server.name == "POST /v1/chat/completions"
    assert server.attributes is not None
    assert server.attributes["http.route"] == "/v1/chat/completions"
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["onlinerl.interaction_id"] == event.interaction_id
    assert server.attributes["onlinerl.policy_version"] == "assistant/1"
    assert client.parent is not None
    assert client.parent.span_id == server.context.span_id
    assert client.attributes is not None
    assert client.attributes["onlinerl.finish_reason"] == "stop"
    num_tokens = len(event.choices[0].completion_token_ids)
    assert client.attributes["gen_ai.usage.output_tokens"] == num_tokens
    assert client.attributes["gen_ai.usage.input_tokens"] == len(event.prompt_token_ids)


async def test_the_context_of_the_caller_goes_on_to_the_engine(traced: Traced) -> None:
    await traced.ask(headers=PARENT)
    server, client = traced.of(SpanKind.SERVER), traced.of(SpanKind.CLIENT)
    (request,) = traced.world.engine.requests

    assert f"{server.context.trace_id:032x}" == TRACE
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" == "b7ad6b7169203331"
    assert request.headers["traceparent"] == f"00-{TRACE}-{client.context.span_id:016x}-01"


async def test_a_caller_that_is_not_traced_is_not_traced_here(traced: Traced) -> None:
    await traced.ask(headers=UNSAMPLED)

    assert traced.spans == []
    (request,) = traced.world.engine.requests
    assert request.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert request.headers["traceparent"].endswith("-00")


async def test_only_the_configured_share_is_traced(renderer: Renderer) -> None:
    traced = Traced(make_world(renderer), sample_ratio=0.0)
    await traced.ask()
    assert traced.spans == []
    await traced.ask(headers=PARENT)

    assert len(traced.spans) == 1


async def test_failures_are_marked_with_their_type_alone(traced: Traced) -> None:
    traced.world.engine.failure = EngineRefused(f"the prompt was {SECRET}", 500)
    await traced.ask()
    server, client = traced.of(SpanKind.SERVER), traced.of(SpanKind.CLIENT)

    assert server.status.status_code is client.status.status_code is StatusCode.ERROR
    assert client.attributes is not None
    assert client.attributes["error.type"] == "EngineRefused"
    assert not any(span.events for span in traced.spans)


async def test_a_path_that_is_no_route_is_not_told(traced: Traced) -> None:
    await traced.ask(path=f"/v1/{SECRET}")

    assert traced.of(SpanKind.SERVER).name == "POST"


async def test_no_span_holds_content_or_keys(traced: Traced) -> None:
    messages = [{"role": "user", "content": SECRET}]
    headers = {"x-secret": SECRET, "cookie": SECRET}
    await traced.ask(body(messages=messages, user=SECRET, metadata={SECRET: SECRET}))
    await traced.ask(headers=headers, key=SECRET)
    await traced.ask({"metric": "m", "value": 1, "comment": SECRET}, path="/v1/feedback")
    await traced.ask(raw=SECRET.encode())
    told = "".join(span.to_json() for span in traced.spans)

    assert len(traced.spans) == 5
    assert SECRET not in told
    assert KEY not in told


async def test_a_bug_is_traced_without_its_message() -> None:
    exporter = InMemorySpanExporter()
    tracing = OpenTelemetryTracing(SimpleSpanProcessor(exporter), sample_ratio=1.0)

    async def buggy(*_: Any) -> None:
        raise ValueError(SECRET)

    app: Any = tracing.app(buggy)
    with pytest.raises(ValueError, match=SECRET):
        await Caller(app, json_body={}).done()

    (span,) = exporter.get_finished_spans()
    assert SECRET not in span.to_json()


async def test_a_caller_that_leaves_ends_both_spans(traced: Traced) -> None:
    traced.world.engine.hold_at = 3
    caller = Caller(traced.app, json_body=body(stream=True))  # type: ignore[arg-type]
    await caller.until(b" link")
    caller.leave()
    await caller.done()
    await traced.world.ended()

    assert {span.kind for span in traced.spans} == {SpanKind.SERVER, SpanKind.CLIENT}


class StuckExporter(SpanExporter):
    """A collector that does not answer."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_batches = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_batches += 1
        self.go_on.wait(30)
        return SpanExportResult.SUCCESS


async def test_a_collector_that_does_not_answer_makes_nobody_wait(renderer: Renderer) -> None:
    exporter = StuckExporter()
    processor = BatchSpanProcessor(
        exporter, max_queue_size=8, max_export_batch_size=4, schedule_delay_millis=1
    )
    tracing = OpenTelemetryTracing(processor, sample_ratio=1.0)
    world = make_world(renderer)
    app: Any = tracing.app(world.app)
    for _ in range(100):
        await Caller(app, json_body=body()).done()

    assert exporter.num_batches <= 1
    assert not exporter.go_on.is_set()
    tracing.close(timeout_s=0.01)
    exporter.go_on.set()
    tracing.close(timeout_s=5)


def test_tracing_is_off_unless_it_is_asked_for() -> None:
    assert isinstance(open_tracing(TracingConfig()), NoTracing)


def test_the_sdk_is_imported_only_when_requests_are_traced() -> None:
    code = (
        "import sys\n"
        "from onlinerl.serving.config import TracingConfig\n"
        "from onlinerl.serving.observability.tracing import open_tracing\n"
        "import onlinerl.serving.api.app\n"
        "open_tracing(TracingConfig())\n"
        "before = [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "tracing = open_tracing(TracingConfig(enabled=True, endpoint='http://127.0.0.1:9/'))\n"
        "after = 'opentelemetry.sdk' in sys.modules\n"
        "tracing.close(timeout_s=0.1)\n"
        "sys.exit(f'{before} {after}' if before or not after else 0)"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
