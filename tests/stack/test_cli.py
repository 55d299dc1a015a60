"""The command line is quick, and says what is wrong without a traceback."""

import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from onlinerl.cli import main
from onlinerl.keys import key_hash

HEAVY = ("torch", "vllm", "mlflow", "transformers", "duckdb", "pyarrow", "kafka", "numpy")


def test_help_and_configuration_import_nothing_heavy() -> None:
    code = (
        "import sys, onlinerl.config, onlinerl.cli\n"
        "try: onlinerl.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout

    assert printed.splitlines()[-1] == "HEAVY []"
    for command in ("up", "gateway", "engine", "ingest", "train", "schedule", "deploy", "query"):
        assert f"    {command} " in printed


def test_a_wrong_configuration_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[policy]\nbase_model = "m"\nlearning_rate = 1\n')

    assert main(["train", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert "policy.learning_rate: unknown key" in error
    assert "Traceback" not in error


def test_a_new_key_is_shown_once_and_configured_by_its_hash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["keys", "new", "shop", "--tenant", "shop", "--consent", "train"]) == 0
    printed = capsys.readouterr()
    key = printed.err.strip().rpartition(" ")[2]
    entry = tomllib.loads(printed.out)["gateway"]["api_keys"][0]

    assert entry == {
        "name": "shop",
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "tenant": "shop",
        "consent": "train",
    }
    assert key not in printed.out


def test_the_hash_of_a_key_is_what_sha256sum_prints() -> None:
    assert key_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
