import subprocess
import sys

import pytest
from pydantic import ValidationError

from onlinerl.rollout_store.config import BrokerConfig, MetricConfig, PolicyConfig, RewardsConfig


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
