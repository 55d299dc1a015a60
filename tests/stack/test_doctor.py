"""`doctor` and `up` find what is wrong before anything is started."""

import socket
from pathlib import Path

import pytest

from onlinerl.cli import main
from onlinerl.keys import key_hash
from onlinerl.serving.engine_config import ENGINE_SECRET
from tests.stack.configuration import write_configuration


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def test_a_right_configuration_has_no_wrong_line(
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
    ], "what is not needed here is no reason for a note"
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
def test_what_is_wrong_is_named_with_a_remedy(
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
def test_an_engine_that_others_reach_needs_a_secret(
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
    assert f"port {port}: taken, and ingest needs it" in capsys.readouterr().err
    assert not (tmp_path / "data" / "logs").exists()


def test_the_key_in_the_configuration_is_only_its_hash(tmp_path: Path, model: Path) -> None:
    text = write_configuration(tmp_path, model=model, key="my-key").read_text()

    assert "my-key" not in text
    assert key_hash("my-key") in text


def test_a_data_folder_that_cannot_be_made_is_said(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_configuration(tmp_path, model=model, key="k")

    assert main(["up", "--config", str(path), "--set", "data_dir=/proc/none"]) == 1
    assert "data_dir /proc/none cannot be made" in capsys.readouterr().err
