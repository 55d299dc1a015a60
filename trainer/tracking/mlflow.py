"""The MLflow form of RunTracker."""

import time
from collections.abc import Mapping
from pathlib import Path

from onlinerl.trainer.tracking.protocol import RunStatus


class MlflowTracker:
    """Runs of one experiment on an MLflow server; the experiment is created when missing."""

    def __init__(self, tracking_uri: str, *, experiment: str) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._experiment = experiment

    def start(self, name: str, *, tags: Mapping[str, str], params: Mapping[str, str]) -> str:
        """Open a run; parameters are those MLflow's Compare shows."""
        from mlflow.entities import Param

        run = self._client.create_run(self._experiment_id(), run_name=name, tags=dict(tags))
        run_id = str(run.info.run_id)
        self._client.log_batch(run_id, params=[Param(*item) for item in params.items()])
        return run_id

    def supersede(self, cycle_id: str) -> None:
        """Close open runs of the cycle as KILLED."""
        runs = self._client.search_runs(
            [self._experiment_id()],
            filter_string=f"tags.`onlinerl.cycle` = '{cycle_id}' and status = 'RUNNING'",
        )
        for run in runs:
            self._client.set_terminated(run.info.run_id, status="KILLED")

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], *, step: int) -> None:
        """One request for all of them."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(run_id, metrics=points)

    def log_folder(self, run_id: str, folder: Path, *, artifact_path: str) -> None:
        """Upload; a repeat overwrites."""
        self._client.log_artifacts(run_id, str(folder), artifact_path)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        for key, value in tags.items():
            self._client.set_tag(run_id, key, value)

    def finish(self, run_id: str, *, status: RunStatus) -> None:
        """Close the run."""
        self._client.set_terminated(run_id, status=status)

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(self._experiment))
        except MlflowException:  # somebody else created it meanwhile; absent still raises below
            return str(self._client.get_experiment_by_name(self._experiment).experiment_id)
