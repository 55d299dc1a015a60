"""Cycles with their real parts: Delta tables, an MLflow server, torch on a tiny model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from safetensors.torch import load_file

from onlinerl.registry.checkpoint import verify_checkpoint, write_manifest
from onlinerl.rollout_store.config import PolicyConfig, RegistryConfig
from onlinerl.settings import Settings
from onlinerl.trainer.assembly import FAULT_VARIABLE, open_database, trainer_lease
from onlinerl.trainer.bookkeeping.ledger import Cycle, Ledger
from onlinerl.trainer.config import ScheduleConfig, TrainerConfig
from onlinerl.trainer.cycle.outcome import outcome_folder
from onlinerl.trainer.cycle.parts import FAULTS
from onlinerl.trainer.main import trainer_settings
from onlinerl.trainer.schedule.exit_codes import EXIT_LEASE_HELD
from tests.brokers import free_port
from tests.process_identity import start_time
from tests.registry_server import mlflow_server
from tests.trainer.builders import REWARDS, make_store, promotion
from tests.trainer.sampled_rollouts import prefer_even_tokens, sample_interactions

pytestmark = pytest.mark.integration

RUN_SCHEDULE = """
import logging, pathlib, sys
from onlinerl.settings import Settings
from onlinerl.trainer.main import run_schedule
logging.basicConfig(level=logging.INFO)
sys.exit(run_schedule(Settings.model_validate_json(pathlib.Path(sys.argv[1]).read_text())))
"""

JOB = (sys.executable, "-m", "onlinerl.trainer.job")


@pytest.fixture(scope="module")
def registry_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow"), port=free_port()) as address:
        yield address


@pytest.fixture(scope="module")
def tables(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 labelled rows that the tiny model sampled at temperature 0.7."""
    root = tmp_path_factory.mktemp("tables") / "store"
    rows = sample_interactions(tiny_model_dir, count=40, served_at=datetime.now(UTC))
    make_store(
        root,
        interactions=rows,
        feedback_rows=prefer_even_tokens(rows),
        promotions=[promotion(1, action="bootstrap")],
    )
    return root


@dataclass(frozen=True)
class Stack:
    """A data folder whose policy has the tiny model as version 1 and champion."""

    settings: Settings
    client: MlflowClient

    @property
    def ledger(self) -> Ledger:
        return Ledger(open_database(self.settings.folder("trainer")))

    def train(self, *, fault: str | None = None) -> subprocess.CompletedProcess[str]:
        """`onlinerl train` in a process of its own."""
        file = self.settings.data_dir / "settings.json"
        file.write_text(self.settings.model_dump_json(), encoding="utf-8")
        environment = os.environ | ({FAULT_VARIABLE: fault} if fault else {})
        return subprocess.run(
            [*JOB, str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    def only_cycle(self) -> Cycle:
        assert self.ledger.count() == 1
        return self.ledger.cycle(1)


@pytest.fixture
def stack(
    request: pytest.FixtureRequest,
    registry_uri: str,
    tables: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
) -> Stack:
    policy = f"p{abs(hash(request.node.name)) % 10**9}"
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path / "data",
            "policy": PolicyConfig(name="assistant", base_model=str(tiny_model_dir)),
            "store": {"root": str(tables)},
            "rewards": REWARDS,
            "registry": RegistryConfig(tracking_uri=registry_uri, experiment=policy),
            "trainer": TrainerConfig(
                min_labelled_rows=10,
                max_attempts=len(FAULTS) + 1,
                tokens_per_step=120,
                learning_rate=1e-3,
                heldout_fraction=0.1,
                k3_max=1.0,
                stop_k3=10.0,
                device="cpu",
                num_threads=1,
            ),
        }
    )
    settings.data_dir.mkdir()
    client = MlflowClient(tracking_uri=registry_uri, registry_uri=registry_uri)
    _bootstrap(client, experiment=policy, model=tiny_model_dir, folder=tmp_path / "v1")
    return Stack(settings, client)


def _bootstrap(client: MlflowClient, *, experiment: str, model: Path, folder: Path) -> None:
    """Version 1 is the base model, as the deploy controller registers it."""
    for version in client.search_model_versions("name = 'assistant'"):
        client.delete_model_version("assistant", version.version)
    if not client.search_registered_models("name = 'assistant'"):
        client.create_registered_model("assistant")
    else:
        client.delete_registered_model("assistant")
        client.create_registered_model("assistant")
    shutil.copytree(model, folder)
    write_manifest(folder, policy="assistant", cycle="bootstrap", parent_version=0)
    run = client.create_run(client.create_experiment(experiment))
    client.log_artifacts(run.info.run_id, str(folder), "checkpoint")
    source = f"{run.info.artifact_uri}/checkpoint"
    version = client.create_model_version("assistant", source=source, run_id=run.info.run_id)
    client.set_registered_model_alias("assistant", "champion", version.version)


def test_a_cycle_registers_a_candidate_that_a_reviewer_can_judge(
    stack: Stack, tmp_path: Path
) -> None:
    result = stack.train()

    assert result.returncode == 0, result.stderr
    candidate = stack.client.get_model_version_by_alias("assistant", "candidate")
    cycle = stack.only_cycle()
    assert cycle.status == "registered"
    assert cycle.version == int(candidate.version) == 2
    assert candidate.tags["cycle"] == cycle.cycle_id
    assert cycle.cycle_id.startswith("assistant-c00001-")
    assert candidate.tags["parent_version"] == "1"
    assert candidate.tags["review"] == "pending"
    assert candidate.tags["window_start"] <= candidate.tags["window_end"]
    assert "| measured |" in candidate.description
    run = stack.client.get_run(candidate.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["loss"] == "tis"
    assert run.data.metrics["window/rows"] == len(cycle.plan.rows)
    assert run.data.metrics["engine_gap"] < 0.02
    assert len(stack.client.get_metric_history(run.info.run_id, "ratio/k3")) >= 2
    names = {
        file.path
        for folder in ("figures", "lineage", "config")
        for file in stack.client.list_artifacts(run.info.run_id, folder)
    }
    assert names == {
        *(f"figures/{name}.png" for name in ("curves", "lengths", "ratios", "rewards")),
        "lineage/interactions.parquet",
        "config/config.json",
    }
    folder = Path(
        download_artifacts(
            artifact_uri=candidate.source,
            dst_path=str(tmp_path),
            tracking_uri=stack.settings.registry.tracking_uri,
        )
    )
    assert verify_checkpoint(folder).parent_version == 1
    _assert_same_names_and_types(folder, Path(stack.settings.policy.base_model))


def _assert_same_names_and_types(folder: Path, parent: Path) -> None:
    new, old = (load_file(path / "model.safetensors") for path in (folder, parent))
    assert new.keys() == old.keys()
    assert {value.dtype for value in new.values()} == {torch.bfloat16}
    assert any(not torch.equal(new[name], old[name]) for name in old)
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (parent / "config.json").read_text()
    )


@pytest.mark.slow
def test_a_cycle_killed_at_every_point_in_turn_keeps_its_window_and_registers_once(
    stack: Stack,
) -> None:
    plans = []
    for fault in FAULTS:
        killed = stack.train(fault=fault)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        plans.append(stack.only_cycle().plan)
        assert stack.ledger.trained_rows() == []

    repeated = stack.train()

    assert repeated.returncode == 0, repeated.stderr
    after = stack.only_cycle()
    assert after.status == "registered"
    assert all(plan == after.plan for plan in plans)
    assert sorted(stack.ledger.trained_rows()) == sorted(after.plan.keys)
    versions = stack.client.search_model_versions("name = 'assistant'")
    assert [v.tags.get("cycle") for v in versions].count(after.cycle_id) == 1
    candidate = stack.client.get_model_version_by_alias("assistant", "candidate")
    assert candidate.version == "2"
    assert stack.client.get_run(candidate.run_id).info.status == "FINISHED"


def test_the_second_of_two_trainers_says_who_holds_the_lease(stack: Stack) -> None:
    file = stack.settings.data_dir / "settings.json"
    file.write_text(stack.settings.model_dump_json(), encoding="utf-8")
    lease = trainer_lease(
        trainer_settings(stack.settings), open_database(stack.settings.folder("trainer"))
    )
    with subprocess.Popen([*JOB, str(file)], stderr=subprocess.PIPE, text=True) as first:
        while f"process {first.pid} on" not in str(lease.holder()):
            assert first.poll() is None
        second = stack.train()
        first.communicate(timeout=200)

    assert first.returncode == 0
    assert second.returncode == EXIT_LEASE_HELD
    assert f"is held by process {first.pid} on" in second.stderr


def test_a_second_cycle_finds_no_rows_that_the_first_has_not_learned_from(stack: Stack) -> None:
    first = stack.train()
    second = stack.train()

    assert first.returncode == 0, first.stderr
    assert second.returncode == 3
    assert "already_trained" in second.stderr


def test_a_lora_cycle_ships_merged_weights_and_keeps_the_adapter(
    stack: Stack, tmp_path: Path
) -> None:
    trainer = stack.settings.trainer.model_copy(update={"adapter": "lora", "lora_rank": 4})
    lora = Stack(stack.settings.model_copy(update={"trainer": trainer}), stack.client)

    result = lora.train()

    assert result.returncode == 0, result.stderr
    folder = outcome_folder(lora.settings.folder("trainer"), lora.only_cycle().cycle_id)
    checkpoint = folder / "checkpoint"
    assert (checkpoint / "adapter" / "adapter_model.safetensors").exists()
    _assert_same_names_and_types(checkpoint, Path(lora.settings.policy.base_model))


def test_the_schedule_runs_a_due_cycle_and_ends_cleanly_when_asked(stack: Stack) -> None:
    schedule = ScheduleConfig(check_every_s=1.0, health_port=free_port())
    settings = stack.settings.model_copy(update={"schedule": schedule})
    file = settings.data_dir / "settings.json"
    file.write_text(settings.model_dump_json(), encoding="utf-8")
    with subprocess.Popen([sys.executable, "-c", RUN_SCHEDULE, str(file)]) as process:
        _wait_until(lambda: stack.ledger.last_finished("assistant") is not None, process=process)
        ready = _get(f"http://127.0.0.1:{schedule.health_port}/health/ready")
        metrics = _get(f"http://127.0.0.1:{schedule.health_port}/metrics")
        process.terminate()

        assert process.wait(timeout=60) == 0
    assert json.loads(ready) == {"status": "ready"}
    assert "onlinerl_trainer_last_tick_timestamp_seconds" in metrics
    assert stack.only_cycle().status == "registered"


@pytest.mark.slow
def test_a_schedule_that_is_ended_in_mid_training_leaves_no_process(stack: Stack) -> None:
    schedule = ScheduleConfig(check_every_s=1.0, health_port=0)
    slow = stack.settings.trainer.model_copy(update={"epochs": 20, "tokens_per_step": 12})
    settings = stack.settings.model_copy(update={"schedule": schedule, "trainer": slow})
    file = settings.data_dir / "settings.json"
    file.write_text(settings.model_dump_json(), encoding="utf-8")
    with subprocess.Popen([sys.executable, "-c", RUN_SCHEDULE, str(file)]) as process:
        _wait_until(lambda: stack.ledger.count() == 1, process=process)
        hint = settings.folder("trainer") / "assistant.lease"
        trainer = json.loads(hint.read_bytes())["pid"]
        process.terminate()

        assert process.wait(timeout=60) == 0
    assert start_time(trainer) is None
    assert stack.only_cycle().status == "planned"
    assert stack.train().returncode == 0


def _wait_until(condition: Callable[[], bool], *, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def test_a_registry_that_is_away_is_an_error_that_says_so(stack: Stack) -> None:
    gone = RegistryConfig(tracking_uri="http://127.0.0.1:19499", experiment="x")
    away = Stack(stack.settings.model_copy(update={"registry": gone}), stack.client)

    result = away.train()

    assert result.returncode == 1
    assert "did not answer" in result.stderr
    assert away.ledger.count() == 0
