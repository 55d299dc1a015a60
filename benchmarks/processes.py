"""The processes that a benchmark of the gateway starts; each ends with its `with` block."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC
from tests.brokers import free_port, read_log

KEY = "benchmark-key"
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server process."""

    url: str
    process: "subprocess.Popen[bytes]"

    def rss_mib(self) -> float:
        """Resident memory of the process and its children, MiB."""
        root = psutil.Process(self.process.pid)
        sizes = [int(p.memory_info().rss) for p in (root, *root.children(recursive=True))]
        return sum(sizes) / 2**20

    def get(self, path: str) -> bytes:
        """The body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            body: bytes = response.read()
        return body

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a Prometheus metric over the label sets that contain `label`."""
        lines = self.get("/metrics").decode().splitlines()
        samples = [
            line for line in lines if line.startswith((f"{name} ", f"{name}{{")) and label in line
        ]
        return sum(float(sample.rsplit(" ", 1)[1]) for sample in samples)


@contextlib.contextmanager
def mock_engine(*, step_s: float = 0.0) -> Iterator[Running]:
    """A process of `benchmarks.mock_engine`, which waits `step_s` seconds before each chunk."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.mock_engine", str(port), str(step_s)]
    with server(command, port=port, path="/health") as running:
        yield running


@contextlib.contextmanager
def gateway(
    folder: Path, *, engine: str, bootstrap: str, model: Path, max_in_flight: int = 2048
) -> Iterator[Running]:
    """A process of `onlinerl gateway` with one API key and the default spool."""
    port = free_port()
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    config = folder / "onlinerl.toml"
    config.write_text(
        f"""
data_dir = {json.dumps(str(folder / "data"))}
[policy]
base_model = {json.dumps(str(model))}
[broker]
bootstrap = "{bootstrap}"
embedded = false
[gateway]
port = {port}
engines = ["{engine}"]
max_model_len = 2048
api_keys = [{{ name = "benchmark", sha256 = "{digest}", consent = "train" }}]
[gateway.limits]
max_in_flight = {max_in_flight}
"""
    )
    command = [sys.executable, "-m", "onlinerl.cli", "gateway", "--config", str(config)]
    with server(command, port=port, path="/health/ready", log=folder / "gateway.log") as running:
        yield running


@contextlib.contextmanager
def litellm(folder: Path, *, engine: str) -> Iterator[Running]:
    """The LiteLLM proxy with one worker; its environment is made once, below `.cache`."""
    environment = REPOSITORY / ".cache" / "litellm"
    program = environment / "bin" / "litellm"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        pip = [str(environment / "bin" / "pip"), "install", "--quiet", "litellm[proxy]"]
        subprocess.run(pip, check=True)
    config = folder / "litellm.yaml"
    config.write_text(
        f"""
model_list:
  - model_name: assistant
    litellm_params: {{model: openai/assistant, api_base: "{engine}/v1", api_key: none}}
general_settings: {{master_key: {KEY}}}
"""
    )
    port = free_port()
    command = [str(program), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    log = folder / "litellm.log"
    with server(command, port=port, path="/health/liveliness", log=log, env=quiet) as running:
        yield running


def litellm_version() -> str:
    """Version of LiteLLM in the environment that `litellm` made."""
    python = REPOSITORY / ".cache" / "litellm" / "bin" / "python"
    code = "import importlib.metadata as m; print(m.version('litellm'))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


@contextlib.contextmanager
def server(
    command: Sequence[str],
    *,
    port: int,
    path: str,
    log: Path | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
) -> Iterator[Running]:
    """Start a process, wait until it answers `path` with 200, and terminate it at the end."""
    with log.open("wb") if log else contextlib.nullcontext(subprocess.DEVNULL) as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | (env or {}), cwd=REPOSITORY
        )
    running = Running(url=f"http://127.0.0.1:{port}", process=process)
    try:
        _wait(running, path, timeout_s=timeout_s, log=log)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def wait_until_shipped(served: Running, *, timeout_s: float = 180) -> None:
    """Wait until the gateway has shipped its whole spool to the broker."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if json.loads(served.get("/health/ready"))["backlog_bytes"] == 0:
            return
    raise RuntimeError(f"the spool was not empty after {timeout_s:g} s")


def logged_ids(bootstrap: str, *, timeout_s: float = 60) -> list[str]:
    """All interaction ids in the broker."""
    values = read_log(bootstrap, INTERACTIONS_TOPIC, timeout_s=timeout_s)
    return [json.loads(value)["interaction_id"] for value in values]


def _wait(running: Running, path: str, *, timeout_s: float, log: Path | None) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and running.process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            running.get(path)
            return
        time.sleep(0.1)
    output = log.read_text(errors="replace")[-3000:] if log else ""
    raise RuntimeError(f"{running.process.args!r} is not ready: {output}")
