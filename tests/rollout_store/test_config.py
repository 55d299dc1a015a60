import subprocess
import sys
import tomllib

import pytest
from pydantic import ValidationError

from onlinerl.rollout_store.config import BrokerConfig, MetricConfig, PolicyConfig, RewardsConfig
from tests.reference import DOCS


@pytest.mark.parametrize("name", ["", "Assistant", "a b", "../x", "a/1", "-a"])
def test_a_policy_name_is_safe_in_a_path_and_a_url(name: str) -> None:
    with pytest.raises(ValidationError):
        PolicyConfig(name=name)


@pytest.mark.parametrize("bootstrap", ["", "kafka", "kafka:", "kafka:9092,", ":9092,x", "a b:1"])
def test_a_broker_address_names_host_and_port(bootstrap: str) -> None:
    with pytest.raises(ValidationError):
        BrokerConfig(bootstrap=bootstrap)
    assert BrokerConfig(bootstrap="a.b:9092, [::1]:1").addresses == ["a.b:9092", "[::1]:1"]


def test_a_metric_is_declared_once() -> None:
    with pytest.raises(ValidationError, match="names accepted more than once"):
        RewardsConfig(metrics=(MetricConfig(name="accepted"), MetricConfig(name="accepted")))


@pytest.mark.parametrize("clip", [(1.0, 1.0), (1.0, -1.0), (float("-inf"), 1.0)])
def test_a_clip_is_a_finite_interval(clip: tuple[float, float]) -> None:
    with pytest.raises(ValidationError):
        RewardsConfig(clip=clip)


@pytest.mark.parametrize("change", [{"scale": 2.0}, {"offset": -1.0}])
def test_a_threshold_takes_the_place_of_scale_and_offset(change: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="leave out scale and offset"):
        MetricConfig.model_validate({"name": "accepted", "threshold": 0.25} | change)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.5, float("nan")])
def test_a_threshold_lies_between_none_and_all(threshold: float) -> None:
    with pytest.raises(ValidationError):
        MetricConfig(name="accepted", threshold=threshold)


def test_a_reward_waits_for_the_longer_of_window_and_maturity() -> None:
    assert RewardsConfig().listed_after_s == 0
    assert RewardsConfig(maturity_s=5).listed_after_s == 5
    assert RewardsConfig(maturity_s=5, attribution_window_s=9).listed_after_s == 9
    assert RewardsConfig(maturity_s=9, attribution_window_s=5).listed_after_s == 9


def test_a_metric_may_weigh_a_source_in_its_own_way() -> None:
    metric = MetricConfig(name="accepted", sources={"judge": 0.25})
    rewards = RewardsConfig(metrics=(metric,), sources={"judge": 2.0, "user": 3.0})

    weights = [rewards.source_weight(metric, source) for source in ("judge", "user", "operator")]
    assert weights == [0.25, 3.0, 1.0]


def test_unknown_sources_and_negative_weights_are_refused() -> None:
    for sources in ({"users": 1.0}, {"user": -1.0}, {"user": float("nan")}):
        with pytest.raises(ValidationError):
            RewardsConfig.model_validate({"sources": sources})


def test_reading_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys, onlinerl.rollout_store.config, onlinerl.ingest.config;"
        "print(*{'numpy', 'pyarrow', 'duckdb', 'deltalake', 'kafka'} & set(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )

    assert answer.stdout.split() == []


def test_the_example_in_the_documentation_is_a_declaration() -> None:
    page = (DOCS / "rewards.md").read_text(encoding="utf-8")
    example = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])

    rewards = RewardsConfig.model_validate(example["rewards"])
    accepted, resolved = rewards.metrics
    assert accepted.threshold == 0.25
    assert rewards.source_weight(accepted, "judge") == 0.5
    assert rewards.source_weight(resolved, "judge") == 0.25
    assert resolved.aggregate_of("judge") == "mean"
