"""What mlflow's errors become."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    INTERNAL_ERROR,
    INVALID_PARAMETER_VALUE,
    RESOURCE_DOES_NOT_EXIST,
)

from onlinerl.errors import ServiceUnavailable
from onlinerl.registry.mlflow_server import (
    MlflowServer,
    is_gone,
    translate_errors,
    value_or_none,
)
from tests.brokers import free_port


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture
def healthy() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_does_not_answer_is_told_before_the_request() -> None:
    server = MlflowServer(f"http://127.0.0.1:{free_port()}", timeout_s=0.5)

    with (
        pytest.raises(ServiceUnavailable, match=r"did not answer within 0.5 s"),
        server.request("versions"),
    ):
        pytest.fail("the request was made")


@pytest.mark.parametrize("error", [MlflowException("API request failed with 503"), OSError("503")])
def test_a_server_that_fails_is_unavailable(healthy: str, error: Exception) -> None:
    server = MlflowServer(f"{healthy}/", timeout_s=5)

    with (
        pytest.raises(ServiceUnavailable, match=r"the registry failed at versions: .*503"),
        server.request("versions"),
    ):
        raise error


def test_a_fault_of_ours_is_not_an_outage() -> None:
    with pytest.raises(ZeroDivisionError), translate_errors("versions"):
        raise ZeroDivisionError


def test_what_the_server_does_not_have_is_told_apart_from_a_failure() -> None:
    gone = MlflowException("no such version", error_code=RESOURCE_DOES_NOT_EXIST)
    failed = MlflowException("no luck", error_code=INTERNAL_ERROR)

    assert is_gone(gone)
    assert is_gone(OSError("404 Client Error: Not Found for url: http://mlflow/artifacts/1"))
    assert not is_gone(failed)


@pytest.mark.parametrize("code", [RESOURCE_DOES_NOT_EXIST, INVALID_PARAMETER_VALUE])
def test_a_missing_alias_or_model_is_none(code: int) -> None:
    def request() -> None:
        raise MlflowException("no such alias", error_code=code)

    assert value_or_none(request) is None
    assert value_or_none(lambda: 1) == 1


def test_a_failure_is_not_none() -> None:
    def request() -> None:
        raise MlflowException("no luck", error_code=INTERNAL_ERROR)

    with pytest.raises(MlflowException, match="no luck"):
        value_or_none(request)


def test_a_download_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    server = MlflowServer("http://127.0.0.1:9", timeout_s=1)  # files are copied without it
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "weights").write_text("1")
    target = tmp_path / "copies" / "v1"

    with pytest.raises(MlflowException, match="gone"):
        server.download(target, artifact_uri=(tmp_path / "gone").as_uri())
    assert list((tmp_path / "copies").iterdir()) == []

    server.download(target, artifact_uri=(tmp_path / "artifact").as_uri())
    assert (target / "weights").read_text() == "1"
    assert [each.name for each in (tmp_path / "copies").iterdir()] == ["v1"]
