"""The controller's registry on a real MLflow server."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from onlinerl.deploy.registry.trained_rows import RegistryRows
from onlinerl.errors import ServiceUnavailable, WeightsError
from onlinerl.registry.checkpoint import verify_checkpoint
from onlinerl.registry.checkpoint_cache import CheckpointCache
from onlinerl.registry.mlflow_registry import MlflowRegistry
from onlinerl.registry.mlflow_server import MlflowServer
from tests.brokers import free_port
from tests.deploy.builders import weights, write_checkpoint
from tests.registry_server import mlflow_server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with mlflow_server(folder, port=free_port()) as uri:
        yield uri


@pytest.fixture
def registry(server: str, request: pytest.FixtureRequest) -> MlflowRegistry:
    """With a policy of the test's own."""
    name = request.node.name
    return MlflowRegistry(MlflowServer(server, timeout_s=30), policy=name, experiment=name)


def test_a_version_from_its_registration_to_its_loss(
    registry: MlflowRegistry, folder: Path, tmp_path: Path
) -> None:
    assert registry.versions() == []
    assert registry.model_tags() == {}
    assert registry.alias("champion") is None
    assert registry.version(1) is None

    checkpoint = write_checkpoint(tmp_path / "base", weights())
    assert registry.register_base(checkpoint) == 1
    assert registry.register_base(checkpoint) == 2

    first, second = registry.versions()
    assert (first.number, first.verdict) == (1, None)
    assert first.origin != second.origin
    assert registry.version(1) == first

    with pytest.raises(ServiceUnavailable, match="has no champion yet"):
        registry.champion()
    registry.set_alias("champion", 2)
    registry.set_alias("champion", 1)
    assert registry.alias("champion") == registry.champion() == 1
    assert registry.undecided() is None
    registry.set_candidate(2)
    assert registry.undecided() == 2

    registry.set_tags(1, {"verdict": "promoted", "rolled_back": "worse"})
    registry.set_tags(1, {"rolled_back": ""})
    registry.describe(1, "| gate |")
    found = registry.version(1)
    assert found is not None
    assert (found.verdict, found.tags["rolled_back"]) == ("promoted", "")
    assert found.description == "| gate |"

    registry.set_model_tag("rollback.request", '{"id": "r1"}')
    assert registry.model_tags()["rollback.request"] == '{"id": "r1"}'

    registry.log_metrics(1, {"gate.drift": 0.25, "gate.perplexity": float("nan")})
    run_id = found.origin.split()[0]
    assert dict(registry._client.get_run(run_id).data.metrics) == {"gate.drift": 0.25}

    registry.download(1, tmp_path / "copies" / "v1")
    verify_checkpoint(tmp_path / "copies" / "v1")
    assert [each.name for each in (tmp_path / "copies").iterdir()] == ["v1"]
    cached = CheckpointCache(tmp_path / "cache", registry).get(1)
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [cached.name]

    shutil.rmtree(next((folder / "artifacts").rglob(run_id)))
    with pytest.raises(WeightsError, match="version 1"):
        registry.download(1, tmp_path / "gone")
    with pytest.raises(WeightsError, match="version 7"):
        registry.is_decided(7)
    with pytest.raises(WeightsError, match="version 7"):
        registry.download(7, tmp_path / "gone")


def test_a_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    away = MlflowRegistry(
        MlflowServer("http://127.0.0.1:19418", timeout_s=0.5),
        policy="assistant",
        experiment="onlinerl",
    )

    with pytest.raises(ServiceUnavailable, match="did not answer"):
        away.download(1, tmp_path / "copy")


def test_the_rows_that_a_version_learned_from_are_read_from_its_run(
    registry: MlflowRegistry, tmp_path: Path
) -> None:
    base = registry.register_base(write_checkpoint(tmp_path / "base", weights()))
    trained = registry.register_base(write_checkpoint(tmp_path / "trained", weights()))
    rows = pa.table({"tenant": ["acme"], "interaction_id": ["i1"], "choice_index": [0]})
    (tmp_path / "lineage").mkdir()
    pq.write_table(rows, tmp_path / "lineage" / "interactions.parquet")
    found = registry.version(trained)
    assert found is not None
    run_id = found.origin.split()[0]
    registry._client.log_artifacts(run_id, str(tmp_path / "lineage"), "lineage")
    lineage = RegistryRows(registry)

    read = lineage.rows(trained)
    lineage.mark(trained, num_erased=3)

    assert read is not None
    assert read.to_pylist() == rows.to_pylist()
    assert lineage.rows(base) is None
    marked = registry.version(trained)
    assert marked is not None
    assert marked.tags["erased_rows"] == "3"
