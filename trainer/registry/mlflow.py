"""The MLflow form of ModelRegistry."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl.errors import ServiceUnavailable

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CANDIDATE = "champion", "candidate"


class MlflowRegistry:
    """Versions of the registered model `policy` on an MLflow server."""

    def __init__(self, tracking_uri: str, *, policy: str, timeout_s: float) -> None:
        # mlflow takes seconds to import; commands that never ask the registry do not pay for it.
        from mlflow import MlflowClient

        self._uri = tracking_uri
        self._policy = policy
        self._timeout_s = timeout_s
        self._client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)

    def check(self) -> None:
        """Ask the server's health endpoint; mlflow's own client would retry for minutes."""
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

    def champion(self) -> int:
        """The version of the alias `champion`."""
        version = self._alias(CHAMPION)
        if version is None:
            raise ServiceUnavailable(
                f"the registered model {self._policy!r} has no champion yet; "
                "`onlinerl deploy` registers the base model as version 1"
            )
        return int(version.version)

    def undecided(self) -> int | None:
        """The version of the alias `candidate`, while it has no tag `verdict`."""
        version = self._alias(CANDIDATE)
        return None if version is None or "verdict" in version.tags else int(version.version)

    def is_decided(self, version: int) -> bool:
        """By the tag `verdict`."""
        return "verdict" in self._client.get_model_version(self._policy, str(version)).tags

    def download(self, version: int, target: Path) -> None:
        """Through the server, which neither checks nor renames: the caller verifies."""
        from mlflow.artifacts import download_artifacts

        found = self._client.get_model_version(self._policy, str(version))
        target.parent.mkdir(parents=True, exist_ok=True)
        local = download_artifacts(
            artifact_uri=found.source, dst_path=str(target.parent), tracking_uri=self._uri
        )
        Path(local).rename(target)

    def version_of(self, cycle_id: str) -> int | None:
        """The latest version with the tag `cycle`."""
        found = self._client.search_model_versions(
            f"name = '{self._policy}' and tags.cycle = '{cycle_id}'"
        )
        return max((int(version.version) for version in found), default=None)

    def create_version(
        self, *, run_id: str, artifact_path: str, tags: Mapping[str, str], description: str
    ) -> int:
        """One request, so a version never exists without its tags."""
        root = self._client.get_run(run_id).info.artifact_uri
        version = self._client.create_model_version(
            self._policy,
            source=f"{root}/{artifact_path}",
            run_id=run_id,
            tags=dict(tags),
            description=description,
        )
        return int(version.version)

    def set_candidate(self, version: int) -> None:
        """Move the alias `candidate`."""
        self._client.set_registered_model_alias(self._policy, CANDIDATE, str(version))

    def _alias(self, alias: str) -> "ModelVersion | None":
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_model_version_by_alias(self._policy, alias)
        except MlflowException as error:
            # A missing alias is INVALID_PARAMETER_VALUE, a missing model RESOURCE_DOES_NOT_EXIST.
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
