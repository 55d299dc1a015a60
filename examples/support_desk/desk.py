"""The stack of the support desk: a configuration file, and `onlinerl up` as a child process."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from onlinerl.commands.keys import key_hash, new_key
from onlinerl.commands.probes import http_problem

POLICY = "assistant"
START_TIMEOUT_S = 600.0

CONFIGURATION = r"""# Written by the demo. docs/configuration.md explains every key.
data_dir = "data"

[policy]
name = "{policy}"
base_model = "{model}"

[broker]
bootstrap = "127.0.0.1:{broker}"

[registry]
tracking_uri = "http://127.0.0.1:{registry}"

[engine]
port = {engine}
max_model_len = 1024
max_num_seqs = 16

[gateway]
port = {gateway}
engines = ["http://127.0.0.1:{engine}"]
max_model_len = 1024
# SmolLM2 writes poorly at temperature 1. The learner divides by the same temperature.
sampling = {{ temperature = 0.7, max_tokens = 48 }}

[[gateway.api_keys]]
name = "support-desk"
sha256 = "{key_hash}"
tenant = "support-desk"
consent = "train"

[rewards]
clip = [0.0, 1.0]

[[rewards.metrics]]
name = "accepted"

[ingest]
health_port = {ingest}

[maintenance]
health_port = {maintain}

[trainer]
# Training the upper half of the layers is enough for a preference, and costs less.
trainable = 'layers\.(1[5-9]|2[0-9])\.'
learning_rate = {learning_rate}
kl_coef = {kl_coef}
tokens_per_step = {tokens_per_step}
micro_batch_tokens = {micro_batch_tokens}
# One epoch of few, large steps moves far from the policy that served, so the bounds are wide.
k3_max = 0.3
stop_k3 = 0.3
max_rows = {rows}
min_labelled_rows = {rows}
heldout_fraction = 0.1
# Each cycle learns only from answers of the champion itself.
max_version_lag = 0

[schedule]
interval_s = 1.0
check_every_s = 3.0
retry_after_s = 2.0
health_port = {schedule}

[deploy]
poll_s = 2.0
health_port = {deploy}
gates.max_rows = 32
gates.perplexity.max_tokens = 768
gates.drift.max_k3 = {max_drift}
gates.drift.min_tokens = 100
gates.reward.min_ess = 5
"""


class Desk:
    """Sets up a data folder with free ports and a new API key, and runs the stack on it.

    Args:
        folder: Folder for the configuration and all data; its content is deleted first.
        model: Hugging Face folder of version 1.
        training: Values for the trainer and the gates, by the names in `CONFIGURATION`.
    """

    def __init__(self, folder: Path, *, model: Path, training: dict[str, float]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.config = folder / "onlinerl.toml"
        self.api_key = new_key()
        parts = "broker registry engine gateway ingest schedule deploy maintain"
        names = parts.split()
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.config.write_text(
            CONFIGURATION.format(
                policy=POLICY,
                model=model.resolve(),
                key_hash=key_hash(self.api_key),
                **self.ports,
                **training,
            ),
            encoding="utf-8",
        )
        self._environment = {
            **os.environ,
            "ONLINERL_USER_HASH_KEY": secrets.token_hex(32),
            # Engine and learner share the cores, so waiting threads must not spin.
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Address of the gateway for OpenAI clients."""
        return f"http://127.0.0.1:{self.ports['gateway']}/v1"

    @property
    def registry_url(self) -> str:
        """Address of the MLflow server."""
        return f"http://127.0.0.1:{self.ports['registry']}"

    @property
    def pid(self) -> int:
        """Process id of `onlinerl up`."""
        assert self._process is not None
        return self._process.pid

    def command(self, *arguments: str) -> list[str]:
        """The command line of an `onlinerl` command with this configuration."""
        name, *rest = arguments
        return [sys.executable, "-m", "onlinerl.cli", name, "--config", str(self.config), *rest]

    def run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run an `onlinerl` command to its end; returns its exit code and output."""
        return subprocess.run(
            self.command(*arguments),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self) -> None:
        """Start the stack and return when it is ready for traffic.

        Raises:
            RuntimeError: when the stack ends or is not ready in time; its output was printed.
        """
        self._process = subprocess.Popen(self.command("up"), env=self._environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        ready = f"http://127.0.0.1:{self.ports['gateway']}/health/ready"
        while http_problem(ready) is not None or http_problem(self._schedule_ready) is not None:
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the stack is not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.5)

    def check(self) -> None:
        """Check that the stack runs.

        Raises:
            RuntimeError: when it has ended.
        """
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"`onlinerl up` ended with code {self._process.returncode}")

    @property
    def _schedule_ready(self) -> str:
        return f"http://127.0.0.1:{self.ports['schedule']}/health/ready"

    def stop(self) -> None:
        """Stop the stack, as Ctrl-C does."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(90)

    def wait(self) -> None:
        """Wait until the stack is stopped by somebody else."""
        assert self._process is not None
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def free_ports(count: int) -> list[int]:
    """Different ports on which nothing listens now."""
    with _sockets(count) as sockets:
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def _sockets(count: int) -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            opened.append(one)
            one.bind(("127.0.0.1", 0))
        yield opened
    finally:
        for one in opened:
            one.close()
