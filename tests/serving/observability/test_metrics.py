import asyncio

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from onlinerl.errors import EngineRefused
from onlinerl.serving.config import LimitsConfig
from onlinerl.serving.observability.answer_metrics import MAX_VERSIONS
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.rendering.template_renderer import TemplateRenderer
from tests.serving.world import Caller, body, make_world


def answered(metrics: GatewayMetrics, version: str, *, num_tokens: int = 3) -> None:
    metrics.answers.count(
        policy_version=version, num_prompt_tokens=7, choices=[("stop", num_tokens)]
    )
    metrics.answers.observe_times(
        policy_version=version, ttft_s=0.2, latency_s=0.6, num_tokens=num_tokens, overhead_s=0.003
    )


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"onlinerl_gateway_{name}", labels) or 0.0


def total(metrics: GatewayMetrics, name: str) -> float:
    lines = generate_latest(metrics.registry).decode().splitlines()
    found = [line for line in lines if line.startswith(f"onlinerl_gateway_{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_an_answer_counts_for_its_version() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    answered(metrics, "assistant/1")
    answered(metrics, "assistant/2", num_tokens=1)

    one = {"policy_version": "assistant/1"}
    assert value(metrics, "tokens_total", kind="prompt", **one) == 7
    assert value(metrics, "tokens_total", kind="completion", **one) == 3
    assert value(metrics, "answers_total", finish_reason="stop", **one) == 1
    assert value(metrics, "ttft_seconds_sum", **one) == pytest.approx(0.2)
    assert value(metrics, "inter_token_seconds_sum", **one) == pytest.approx(0.2)
    assert value(metrics, "overhead_seconds_sum", **one) == pytest.approx(0.003)
    assert value(metrics, "inter_token_seconds_count", policy_version="assistant/2") == 0


@given(st.lists(st.integers(1, 2 * MAX_VERSIONS), min_size=20, max_size=40))
@settings(max_examples=10, phases=[Phase.generate])
def test_versions_are_bounded_and_sums_over_them_never_go_down(versions: list[int]) -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    for number, version in enumerate(versions, start=1):
        answered(metrics, f"assistant/{version}")
        if number % 5:
            continue
        assert total(metrics, "tokens_total") == 10 * number
        assert total(metrics, "ttft_seconds_count") == number
        assert total(metrics, "ttft_seconds_sum") == pytest.approx(0.2 * number)

    text = generate_latest(metrics.registry).decode()
    assert total(metrics, "answers_total") == len(versions)
    assert text.count("onlinerl_gateway_answers_total{") <= MAX_VERSIONS + 1
    for version in versions[-1:]:
        assert value(metrics, "ttft_seconds_count", policy_version=f"assistant/{version}") >= 1


def counters(registry: CollectorRegistry) -> dict[str, float]:
    """Sums of everything that only counts up, over all labels."""
    sums: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            counts = family.type == "counter" or sample.name.endswith(("_bucket", "_count", "_sum"))
            if counts and not sample.name.endswith("_created"):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def test_whatever_happens_to_many_requests_at_once_no_counter_goes_down(
    renderer: TemplateRenderer,
) -> None:
    world = make_world(renderer, num_engines=3, limits=LimitsConfig(max_in_flight=6))
    for replica in world.gateway.pool.replicas:
        await world.gateway.pool.look(replica)
    before = counters(world.gateway.metrics.registry)
    for round_number in range(MAX_VERSIONS + 10):
        for engine in world.engines:
            engine.version = f"assistant/{round_number + 1}"
            engine.failure = EngineRefused("no", 418) if round_number % 5 == 4 else None
            engine.hold_at = 2 if round_number % 3 == 2 else None
        callers = [Caller(world.app, json_body=body(stream=n % 2 == 0)) for n in range(8)]
        for caller in callers[:: 1 if world.engine.hold_at else 4]:
            await asyncio.sleep(0)
            caller.leave()
        for caller in callers:
            await caller.done()
            now = counters(world.gateway.metrics.registry)
            assert {name for name in before if now[name] < before[name]} == set()
            before = now
        await world.ended()

    text = generate_latest(world.gateway.metrics.registry).decode()
    for seen in ('"client_disconnect"', '"stop"', 'status="418"', 'status="429"', '"older"'):
        assert seen in text
