"""The command line starts quickly and reports errors without a traceback."""

import hashlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from onlinerl.cli import main
from onlinerl.commands import up
from onlinerl.commands.keys import key_hash
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.settings import Settings

HEAVY = (
    "aiohttp",
    "deltalake",
    "duckdb",
    "kafka",
    "mlflow",
    "numpy",
    "pyarrow",
    "starlette",
    "torch",
    "transformers",
    "vllm",
)
COMMANDS = (
    "up", "doctor", "gateway", "engine", "ingest", "train", "schedule", "deploy", "promote",
    "rollback", "status", "query", "snapshot", "maintain", "erase", "lineage", "export",
    "dead-letters", "keys",
)  # fmt: skip


def run_python(code: str) -> list[str]:
    """The lines that `code` prints in a fresh interpreter."""
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return printed.splitlines()


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    *help_text, modules = run_python(
        "import sys, onlinerl.cli\n"
        "try: onlinerl.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    listed = [line.split()[0] for line in help_text if line.startswith("    ")]

    assert [name for name in listed if name in COMMANDS] == list(COMMANDS)
    assert not {*HEAVY, "pydantic"} & set(modules.split())


def test_reading_a_configuration_imports_nothing_heavy() -> None:
    (modules,) = run_python("import sys, onlinerl.settings\nprint(*sys.modules)")

    assert not set(HEAVY) & set(modules.split())


def test_a_closed_pipe_ends_a_query_without_a_message(tmp_path: Path) -> None:
    config = tmp_path / "onlinerl.toml"
    config.write_text('[policy]\nbase_model = "m"\n')
    sql = "SELECT range AS n FROM range(200000)"
    DeltaStore(str(tmp_path / ".onlinerl" / "store")).create()
    command = [sys.executable, "-m", "onlinerl.cli", "query", sql, "--config", str(config)]
    command += ["--format", "csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()

    assert (first.strip(), errors) == (b'"n"', b"")


def test_up_passes_its_configuration_and_options_to_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "onlinerl.toml"
    config.write_text('[policy]\nbase_model = "m"\n')
    commands: list[Sequence[str]] = []

    def run_up(settings: Settings, *, config: Path, options: Sequence[str]) -> int:
        commands.extend(
            part.command for part in up._parts(settings, config=config, options=options)
        )
        return 0

    monkeypatch.setattr(up, "run_up", run_up)
    options = ["--log-level", "debug", "--set", "gateway.port=1", "--set", "engine.port=2"]
    main(["up", "--config", str(config), *options])

    parts = [command for command in commands if "onlinerl.cli" in command]
    assert len(parts) == 6
    assert all(list(command[4:]) == ["--config", str(config), *options] for command in parts)


def test_a_file_that_cannot_be_written_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "onlinerl.toml"
    config.write_text('[policy]\nbase_model = "m"\n')
    (tmp_path / "file").touch()

    assert main(["train", "--config", str(config), "--set", "data_dir=file"]) == 1
    assert capsys.readouterr().err.startswith("onlinerl train: ")


def test_other_users_cannot_read_what_a_command_writes(tmp_path: Path) -> None:
    config = tmp_path / "onlinerl.toml"
    config.write_text('[policy]\nbase_model = "m"\n')
    DeltaStore(str(tmp_path / ".onlinerl" / "store")).create()
    os.umask(0o022)
    main(["snapshot", "create", "june", "--config", str(config)])
    written = [*(tmp_path / ".onlinerl" / "store" / "snapshots").rglob("*.parquet")]

    assert written
    assert [file.stat().st_mode & 0o777 for file in written] == [0o640] * len(written)


def test_a_wrong_configuration_is_reported_in_one_line_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[policy]\nbase_model = "m"\nlearning_rate = 1\n')

    assert main(["train", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert "policy.learning_rate: unknown key" in error
    assert "Traceback" not in error


def test_a_new_key_is_printed_once_and_configured_by_its_hash(
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


def test_the_hash_of_a_key_equals_the_output_of_sha256sum() -> None:
    assert key_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
