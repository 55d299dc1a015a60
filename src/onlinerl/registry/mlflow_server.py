"""An MLflow server: whether it answers in time, what its errors mean, and downloads from it."""

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

from onlinerl.errors import ServiceUnavailable

T = TypeVar("T")


class MlflowServer:
    """One MLflow server and mlflow's client of it; importing mlflow takes seconds.

    Args:
        uri: Tracking URI; one without http is a local store, which always answers.
        timeout_s: Seconds to wait for an answer of the health endpoint.
    """

    def __init__(self, uri: str, *, timeout_s: float) -> None:
        # mlflow reads this when it is imported: progress bars of downloads are noise in a log.
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        from mlflow import MlflowClient

        self._uri = uri
        self._timeout_s = timeout_s
        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def check(self) -> None:
        """Raise ServiceUnavailable when the health endpoint does not answer in time."""
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

    @contextmanager
    def request(self, what: str) -> Iterator[None]:
        """Make the block's requests to the server, and raise its errors as ours.

        Asks the health endpoint first: mlflow's client would try for minutes.

        Args:
            what: Name of the request, for the error message.

        Raises:
            ServiceUnavailable: the server does not answer or fails.
        """
        self.check()
        with translate_errors(what):
            yield

    def experiment_id(self, name: str) -> str:
        """Id of an experiment, which is created when it is missing.

        Raises:
            MlflowException: the server fails.
        """
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self.client.create_experiment(name))
        except MlflowException:  # created by another process meanwhile; else the next line raises
            return str(self.client.get_experiment_by_name(name).experiment_id)

    def download(self, target: Path, **source: str) -> None:
        """Copy an artifact, a file or a folder, to `target`; it appears complete or not at all.

        Call it inside `request`.

        Args:
            target: Missing, or an empty folder for a folder.
            source: `artifact_uri`, or `run_id` and `artifact_path`.

        Raises:
            MlflowException: the server fails, or has no such artifact (`is_gone`).
            OSError: likewise, or `target` cannot be written.
        """
        from mlflow.artifacts import download_artifacts

        staging = target.with_name(f"{target.name}.download")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            local = download_artifacts(dst_path=str(staging), tracking_uri=self._uri, **source)
            Path(local).rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raise what mlflow's client raises in the block as ServiceUnavailable.

    Use it alone where mlflow's own minutes of retries are wanted, as during training.

    Args:
        what: Name of the request, for the error message.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError) as error:
        raise ServiceUnavailable(f"the registry failed at {what}: {error}") from error


def is_gone(error: Exception) -> bool:
    """Whether the server answered that it has no such thing, so that asking again is no help."""
    # mlflow passes on the server's answer to a download only as text.
    answers = ("RESOURCE_DOES_NOT_EXIST", "404 Client Error")
    return getattr(error, "error_code", None) == answers[0] or any(
        answer in str(error) for answer in answers
    )


def value_or_none(request: Callable[[], T]) -> T | None:
    """The answer to a request for one model, version or alias; None when there is no such thing."""
    from mlflow.exceptions import MlflowException

    try:
        return request()
    except MlflowException as error:
        # A missing alias is INVALID_PARAMETER_VALUE, a missing model RESOURCE_DOES_NOT_EXIST.
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
