"""The registry on an MLflow server.

Aliases in MLflow have neither history nor compare-and-swap: the deploy controller, under its lease,
is the only writer of `champion`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from onlinerl.errors import WeightsError
from onlinerl.registry.mlflow_server import MlflowServer, is_gone, value_or_none
from onlinerl.registry.policy_registry import PolicyRegistry
from onlinerl.registry.version import CYCLE, RegisteredVersion

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_CHECKPOINT = "checkpoint"


class MlflowRegistry(PolicyRegistry):
    """Versions of the registered model `policy` on an MLflow server.

    Args:
        server: Asked whether it answers before each request.
        policy: Name of the registered model.
        experiment: Experiment of the run that registers the base model.
    """

    def __init__(self, server: MlflowServer, *, policy: str, experiment: str) -> None:
        super().__init__(policy)
        self._experiment = experiment
        self._server = server
        self._client = server.client

    @override
    def check(self) -> None:
        self._server.check()

    @override
    def versions(self) -> Sequence[RegisteredVersion]:
        with self._server.request("versions"):
            found: list[ModelVersion] = []
            token = None
            while True:
                page = self._client.search_model_versions(
                    f"name = '{self.policy}'", max_results=1000, page_token=token
                )
                found += page
                if not (token := page.token):
                    break
            return sorted((_record(each) for each in found), key=lambda version: version.number)

    @override
    def version(self, number: int) -> RegisteredVersion | None:
        with self._server.request("version"):
            found = value_or_none(lambda: self._client.get_model_version(self.policy, str(number)))
            return None if found is None else _record(found)

    @override
    def version_of(self, cycle_id: str) -> int | None:
        with self._server.request("version_of"):
            found = self._client.search_model_versions(
                f"name = '{self.policy}' and tags.{CYCLE} = '{cycle_id}'"
            )
            return max((int(version.version) for version in found), default=None)

    @override
    def alias(self, name: str) -> int | None:
        with self._server.request("alias"):
            found = value_or_none(
                lambda: self._client.get_model_version_by_alias(self.policy, name)
            )
            return None if found is None else int(found.version)

    @override
    def set_alias(self, name: str, version: int) -> None:
        with self._server.request("set_alias"):
            self._client.set_registered_model_alias(self.policy, name, str(version))

    @override
    def set_tags(self, version: int, tags: Mapping[str, str]) -> None:
        with self._server.request("set_tags"):
            for key, value in tags.items():
                self._client.set_model_version_tag(self.policy, str(version), key, value)

    @override
    def describe(self, version: int, description: str) -> None:
        with self._server.request("describe"):
            self._client.update_model_version(self.policy, str(version), description=description)

    @override
    def model_tags(self) -> Mapping[str, str]:
        with self._server.request("model_tags"):
            found = value_or_none(lambda: self._client.get_registered_model(self.policy))
            return {} if found is None else dict(found.tags)

    @override
    def set_model_tag(self, key: str, value: str) -> None:
        with self._server.request("set_model_tag"):
            self._client.set_registered_model_tag(self.policy, key, value)

    @override
    def download(self, version: int, target: Path) -> None:
        from mlflow.exceptions import MlflowException

        with self._server.request("download"):
            try:
                found = self._client.get_model_version(self.policy, str(version))
                self._server.download(target, artifact_uri=found.source)
            except (MlflowException, OSError) as error:
                if is_gone(error):
                    raise WeightsError(
                        f"the registry has no checkpoint of version {version}: {error}"
                    ) from error
                raise

    def download_from_run(self, version: int, path: str, target: Path) -> bool:
        """Copy an artifact of the run that made a version; False when there is no such artifact.

        Args:
            version: Number of the version.
            path: Path of the artifact within the run.
            target: Path of the copy, which is missing.
        """
        from mlflow.exceptions import MlflowException

        with self._server.request("download_from_run"):
            run_id = self._client.get_model_version(self.policy, str(version)).run_id
            if not run_id:
                return False
            try:
                self._server.download(target, run_id=run_id, artifact_path=path)
            except (MlflowException, OSError) as error:
                if is_gone(error):
                    return False
                raise
            return True

    @override
    def register_base(self, checkpoint: Path) -> int:
        with self._server.request("register_base"):
            if value_or_none(lambda: self._client.get_registered_model(self.policy)) is None:
                self._client.create_registered_model(self.policy)
            run = self._client.create_run(
                self._server.experiment_id(self._experiment), run_name="bootstrap"
            )
            self._client.log_artifacts(run.info.run_id, str(checkpoint), _CHECKPOINT)
            version = self._client.create_model_version(
                self.policy,
                source=f"{run.info.artifact_uri}/{_CHECKPOINT}",
                run_id=run.info.run_id,
                tags={CYCLE: "bootstrap"},
                description="The base model, as first served.",
            )
            self._client.set_terminated(run.info.run_id)
            return int(version.version)

    @override
    def create_version(
        self, *, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str
    ) -> int:
        with self._server.request("create_version"):
            root = self._client.get_run(run_id).info.artifact_uri
            version = self._client.create_model_version(
                self.policy,
                source=f"{root}/{artifact_path}",
                run_id=run_id,
                tags=dict(tags),
                description=description,
            )
            return int(version.version)

    @override
    def log_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        with self._server.request("log_metrics"):
            run_id = self._client.get_model_version(self.policy, str(version)).run_id
            for key, value in metrics.items():
                if run_id and math.isfinite(value):  # MLflow cannot store nan
                    self._client.log_metric(run_id, key, value)


def _record(found: "ModelVersion") -> RegisteredVersion:
    return RegisteredVersion(
        int(found.version),
        dict(found.tags),
        found.description or "",
        f"{found.run_id} {found.source}",
    )
