"""The MLflow form of RunTracker."""

import time
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from onlinerl.registry.mlflow_server import MlflowServer, translate_errors
from onlinerl.trainer.tracking.protocol import RunStatus, RunTracker


class MlflowTracker(RunTracker):
    """Runs of one experiment on an MLflow server; the experiment is created when missing.

    Requests are repeated for as long as mlflow's client does it, which is minutes: a server that
    restarts does not end a cycle that has trained for hours.
    """

    def __init__(self, server: MlflowServer, *, experiment: str) -> None:
        self._server = server
        self._client = server.client
        self._experiment = experiment

    @override
    def start(self, name: str, *, tags: Mapping[str, str], params: Mapping[str, str]) -> str:
        from mlflow.entities import Param

        with translate_errors("start"):
            experiment_id = self._server.experiment_id(self._experiment)
            run = self._client.create_run(experiment_id, run_name=name, tags=dict(tags))
            run_id = str(run.info.run_id)
            self._client.log_batch(run_id, params=[Param(*item) for item in params.items()])
            return run_id

    @override
    def supersede(self, cycle_id: str) -> None:
        with translate_errors("supersede"):
            runs = self._client.search_runs(
                [self._server.experiment_id(self._experiment)],
                filter_string=f"tags.`onlinerl.cycle` = '{cycle_id}' and status = 'RUNNING'",
            )
            for run in runs:
                self._client.set_terminated(run.info.run_id, status="KILLED")

    @override
    def log_metrics(self, run_id: str, metrics: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        with translate_errors("log_metrics"):
            self._client.log_batch(run_id, metrics=points)

    @override
    def log_folder(self, run_id: str, folder: Path, *, artifact_path: str) -> None:
        with translate_errors("log_folder"):
            self._client.log_artifacts(run_id, str(folder), artifact_path)

    @override
    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        with translate_errors("set_tags"):
            for key, value in tags.items():
                self._client.set_tag(run_id, key, value)

    @override
    def finish(self, run_id: str, *, status: RunStatus) -> None:
        with translate_errors("finish"):
            self._client.set_terminated(run_id, status=status)
