"""The MLflow form of Registry.

Aliases in MLflow have neither history nor compare-and-swap: the controller, under its lease, is
the only writer of `champion`.
"""

import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from onlinerl.deploy.registry.protocol import PolicyVersion
from onlinerl.errors import ServiceUnavailable, WeightsError

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_CHECKPOINT = "checkpoint"
_R = TypeVar("_R")


class MlflowRegistry:
    """Versions of the registered model `policy` on an MLflow server."""

    def __init__(
        self, tracking_uri: str, *, policy: str, experiment: str, timeout_s: float
    ) -> None:
        # Read when mlflow is imported: bars of downloads are noise in a log.
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        # mlflow takes seconds to import; commands that never ask the registry do not pay for it.
        from mlflow import MlflowClient

        self._uri = tracking_uri
        self._policy = policy
        self._experiment = experiment
        self._timeout_s = timeout_s
        self._client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)

    def check(self) -> None:
        """Ask the server's health endpoint."""
        if not self._uri.startswith(("http://", "https://")):
            return
        try:
            url = f"{self._uri.rstrip('/')}/health"
            with urllib.request.urlopen(url, timeout=self._timeout_s):
                return
        except (urllib.error.URLError, OSError, HTTPException) as error:
            raise ServiceUnavailable(
                f"the registry at {self._uri} did not answer within {self._timeout_s:g} s: {error}"
            ) from error

    def versions(self) -> Sequence[PolicyVersion]:
        """By search, in pages."""
        with self._asked("versions"):
            found: list[ModelVersion] = []
            token = None
            while True:
                page = self._client.search_model_versions(
                    f"name = '{self._policy}'", max_results=1000, page_token=token
                )
                found += page
                if not (token := page.token):
                    break
            return sorted((_version(each) for each in found), key=lambda version: version.number)

    def version(self, number: int) -> PolicyVersion | None:
        """By number."""
        with self._asked("version"):
            found = _or_none(lambda: self._client.get_model_version(self._policy, str(number)))
            return None if found is None else _version(found)

    def alias(self, name: str) -> int | None:
        """By name."""
        with self._asked("alias"):
            found = _or_none(lambda: self._client.get_model_version_by_alias(self._policy, name))
            return None if found is None else int(found.version)

    def set_alias(self, name: str, version: int) -> None:
        """Last writer wins."""
        with self._asked("set_alias"):
            self._client.set_registered_model_alias(self._policy, name, str(version))

    def set_tags(self, version: int, tags: Mapping[str, str]) -> None:
        """One request each."""
        with self._asked("set_tags"):
            for key, value in tags.items():
                self._client.set_model_version_tag(self._policy, str(version), key, value)

    def describe(self, version: int, description: str) -> None:
        """Shown as Markdown."""
        with self._asked("describe"):
            self._client.update_model_version(self._policy, str(version), description=description)

    def model_tags(self) -> Mapping[str, str]:
        """Of the registered model."""
        with self._asked("model_tags"):
            found = _or_none(lambda: self._client.get_registered_model(self._policy))
            return {} if found is None else dict(found.tags)

    def set_model_tag(self, key: str, value: str) -> None:
        """On the registered model."""
        with self._asked("set_model_tag"):
            self._client.set_registered_model_tag(self._policy, key, value)

    def download(self, version: int, target: Path) -> None:
        """Through the server, which neither checks nor renames: the caller verifies."""
        with self._asked("download"):
            from mlflow.artifacts import download_artifacts
            from mlflow.exceptions import MlflowException

            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                found = self._client.get_model_version(self._policy, str(version))
                local = download_artifacts(
                    artifact_uri=found.source, dst_path=str(target.parent), tracking_uri=self._uri
                )
            except (MlflowException, OSError) as error:
                if _is_gone(error):
                    raise WeightsError(
                        f"the registry has no checkpoint of version {version}: {error}"
                    ) from error
                raise
            Path(local).rename(target)

    def download_from_run(self, version: int, path: str, target: Path) -> bool:
        """Copy an artifact of the run that made a version; False when it has none there."""
        with self._asked("download_from_run"):
            from mlflow.artifacts import download_artifacts
            from mlflow.exceptions import MlflowException

            run_id = self._client.get_model_version(self._policy, str(version)).run_id
            if not run_id:
                return False
            try:
                local = download_artifacts(
                    run_id=run_id,
                    artifact_path=path,
                    dst_path=str(target.parent / "download"),
                    tracking_uri=self._uri,
                )
            except (MlflowException, OSError) as error:
                if _is_gone(error):
                    return False
                raise
            Path(local).rename(target)
            return True

    def register_base(self, checkpoint: Path) -> int:
        """A run `bootstrap` with the checkpoint as its artifact, and a version made of it."""
        with self._asked("register_base"):
            if _or_none(lambda: self._client.get_registered_model(self._policy)) is None:
                self._client.create_registered_model(self._policy)
            run = self._client.create_run(self._experiment_id(), run_name="bootstrap")
            self._client.log_artifacts(run.info.run_id, str(checkpoint), _CHECKPOINT)
            version = self._client.create_model_version(
                self._policy,
                source=f"{run.info.artifact_uri}/{_CHECKPOINT}",
                run_id=run.info.run_id,
                tags={"cycle": "bootstrap"},
                description="The base model, as first served.",
            )
            self._client.set_terminated(run.info.run_id)
            return int(version.version)

    def log_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """On the run; a version without one keeps none. MLflow cannot store nan."""
        with self._asked("log_metrics"):
            run_id = self._client.get_model_version(self._policy, str(version)).run_id
            for key, value in metrics.items():
                if run_id and math.isfinite(value):
                    self._client.log_metric(run_id, key, value)

    @contextmanager
    def _asked(self, what: str) -> Iterator[None]:
        """Check that the server is there first: mlflow's client would retry for minutes."""
        from mlflow.exceptions import MlflowException

        self.check()
        try:
            yield
        except (MlflowException, OSError) as error:
            raise ServiceUnavailable(f"the registry failed at {what}: {error}") from error

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self._experiment))


def _version(found: "ModelVersion") -> PolicyVersion:
    return PolicyVersion(
        int(found.version),
        dict(found.tags),
        found.description or "",
        f"{found.run_id} {found.source}",
    )


def _is_gone(error: Exception) -> bool:
    """Whether the server answered that there is none; asking again would not help.

    Of a download, mlflow passes on the server's answers only as text.
    """
    code = getattr(error, "error_code", None)
    answers = ("RESOURCE_DOES_NOT_EXIST", "404 Client Error")
    return code == answers[0] or any(answer in str(error) for answer in answers)


def _or_none(request: Callable[[], _R]) -> _R | None:
    from mlflow.exceptions import MlflowException

    try:
        return request()
    except MlflowException as error:
        # A missing alias is INVALID_PARAMETER_VALUE, a missing model RESOURCE_DOES_NOT_EXIST.
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
