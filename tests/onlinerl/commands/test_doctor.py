"""`doctor` and `up` find errors in a configuration before anything is started."""

import http.server
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trustme

from onlinerl.cli import main
from onlinerl.commands.keys import key_hash
from onlinerl.secret_names import ENGINE_SECRET
from tests.onlinerl.configuration import write_configuration


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def test_a_correct_configuration_has_no_wrong_line(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ONLINERL_USER_HASH_KEY", raising=False)
    path = write_configuration(tmp_path, model=model, key="k")

    assert main(["doctor", "--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("WRONG")]
    assert [line.split()[1] for line in lines if "not set: it" in line] == [
        "ONLINERL_USER_HASH_KEY"
    ], "secrets that this configuration does not need give no note"
    assert any(line.startswith("note  gateway ") and "does not answer" in line for line in lines)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.base_model=/no/such/folder", "/no/such/folder is not a folder"),
        ("policy.base_model=model/typo", "model/typo is not a folder"),
        ("gateway.api_keys=[]", "there is no default key; make one with `onlinerl keys add"),
        ("gateway.max_model_len=4096", "is more than engine.max_model_len"),
    ],
)
def test_errors_are_named_with_a_remedy(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    override: str,
    words: str,
) -> None:
    path = write_configuration(tmp_path, model=model, key="k")

    assert main(["doctor", "--config", str(path), "--set", override]) == 1
    assert words in capsys.readouterr().out
    assert main(["up", "--config", str(path), "--set", override]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "data" / "logs").exists()


@pytest.mark.parametrize(("secret", "status"), [("", 1), ("short", 1), ("x" * 16, 0)])
def test_an_engine_that_other_machines_can_reach_needs_a_secret(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    secret: str,
    status: int,
) -> None:
    monkeypatch.setenv(ENGINE_SECRET, secret)
    path = write_configuration(tmp_path, model=model, key="k")

    assert main(["doctor", "--config", str(path), "--set", "engine.host=10.0.0.5"]) == status
    output = capsys.readouterr().out
    assert ("set ONLINERL_ENGINE_SECRET to 16 characters" in output) == bool(status)
    assert ("behind a guard" in output) != bool(status)


def test_up_refuses_a_port_that_is_taken(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_configuration(tmp_path, model=model, key="k")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        override = f"ingest.health_port={port}"

        assert main(["up", "--config", str(path), "--set", override]) == 1
    assert f"port {port}: taken, and ingest needs it; stop the process" in capsys.readouterr().err
    assert not (tmp_path / "data" / "logs").exists()


def test_up_refuses_port_0_for_the_gateway(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_configuration(tmp_path, model=model, key="k")

    assert main(["up", "--config", str(path), "--set", "gateway.port=0"]) == 1
    assert "gateway.port: 0 is any free port" in capsys.readouterr().err


def test_a_part_without_a_port_is_reported_as_not_checked(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_configuration(tmp_path, model=model, key="k")

    assert main(["doctor", "--config", str(path), "--set", "ingest.health_port=0"]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if " ingest " in each)
    assert line.split(maxsplit=2)[:2] == ["note", "ingest"]
    assert "not checked" in line


def test_a_wrong_protocol_and_a_wrong_address_are_reported_without_the_password(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_configuration(tmp_path, model=model, key="k")
    with serve_banner(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        uri = f"registry.tracking_uri=http://ada:s3cret@127.0.0.1:{port}"
        assert main(["doctor", "--config", str(path), "--set", uri]) == 0
    (line,) = (each for each in capsys.readouterr().out.splitlines() if " registry " in each)
    assert f"does not answer: http://127.0.0.1:{port}/health" in line
    assert "s3cret" not in line

    uri = "registry.tracking_uri=http://ada:s3cret@127.0.0.1:999999"
    assert main(["doctor", "--config", str(path), "--set", uri]) == 1
    message = capsys.readouterr().err
    assert "http://127.0.0.1:999999: Port out of range" in message
    assert "s3cret" not in message


@contextmanager
def serve_banner(banner: bytes) -> Iterator[int]:
    """Serve a protocol other than HTTP, in which the server speaks first; yields the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(banner)
                    connection.close()

        threading.Thread(target=greet, daemon=True).start()
        yield int(server.getsockname()[1])


@pytest.mark.parametrize("asks_for_certificates", [False, True])
def test_a_gateway_with_tls_is_checked_over_tls(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], asks_for_certificates: bool
) -> None:
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(
        str(tmp_path / "own.pem")
    )
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem")
    tls = 'cert = "own.pem", key = "own.pem"'
    if asks_for_certificates:
        context.load_verify_locations(tmp_path / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        tls += ', client_ca = "ca.pem"'
    path = write_configuration(tmp_path, model=model, key="k")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        options = [f"gateway.port={port}", f"gateway.tls={{ {tls} }}"]
        words = [word for option in options for word in ("--set", option)]
        assert main(["doctor", "--config", str(path), *words]) == 0
        server.shutdown()

    (line,) = (each for each in capsys.readouterr().out.splitlines() if " gateway " in each)
    assert line.split() == ["ok", "gateway", "answers", f"(127.0.0.1:{port})"]


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_configuration_holds_only_the_hash_of_a_key(tmp_path: Path, model: Path) -> None:
    text = write_configuration(tmp_path, model=model, key="my-key").read_text()

    assert "my-key" not in text
    assert key_hash("my-key") in text


def test_a_data_folder_that_cannot_be_created_is_reported(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_configuration(tmp_path, model=model, key="k")

    assert main(["up", "--config", str(path), "--set", "data_dir=/proc/none"]) == 1
    assert "data_dir /proc/none cannot be created" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["doctor", "--config", str(path), "--set", "data_dir=file"]) == 1
    assert "file is not a folder" in capsys.readouterr().out
