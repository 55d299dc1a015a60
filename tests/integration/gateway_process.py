"""A real gateway in a process of its own, for tests of this folder."""

import contextlib
import hashlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY = "integration-key"

_RUN = """
import json, logging, sys
from pathlib import Path
from types import SimpleNamespace
from onlinerl.rollout_store.config import BrokerConfig, StoreConfig
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.main import run_gateway

told = json.load(open(sys.argv[1]))
logging.basicConfig(level=told["log_level"])
settings = SimpleNamespace(
    gateway=GatewayConfig(**told["gateway"]),
    broker=BrokerConfig(**told["broker"]),
    policy=SimpleNamespace(name="assistant", base_model=told["base_model"]),
    folder=lambda name: Path(told["data_dir"]) / name,
    store_root=str(Path(told["data_dir"]) / "store"),
    store=StoreConfig(),
)
sys.exit(run_gateway(settings))
"""


@dataclass
class GatewayProcess:
    """A running gateway."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    tls: ssl.SSLContext | None = None
    """How a client trusts it."""

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10, context=self.tls) as response:
            return json.load(response)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        with urllib.request.urlopen(
            self.url + "/metrics", timeout=10, context=self.tls
        ) as response:
            lines = response.read().decode().splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def kill(self) -> None:
        """Crash."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> int:
        """Stop cleanly; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)


@contextlib.contextmanager
def running_gateway(
    folder: Path,
    *,
    port: int,
    engine: str,
    bootstrap: str,
    model_dir: Path,
    log_level: str = "INFO",
    client_tls: ssl.SSLContext | None = None,
    **gateway: Any,
) -> Iterator[GatewayProcess]:
    """Start a gateway and wait until it is ready; killed at the end if it still runs."""
    config = {
        "gateway": {
            "port": port,
            "engines": [engine],
            "max_model_len": 1024,
            "api_keys": [
                {
                    "name": "test",
                    "sha256": hashlib.sha256(KEY.encode()).hexdigest(),
                    "consent": "train",
                }
            ],
            **gateway,
        },
        "broker": {"bootstrap": bootstrap, "request_timeout_s": 5.0},
        "base_model": str(model_dir),
        "data_dir": str(folder),
        "log_level": log_level,
    }
    path, log = folder / "gateway.json", folder / "gateway.log"
    path.write_text(json.dumps(config))
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(path)],
            stdout=output,
            stderr=output,
            env={**os.environ, "ONLINERL_USER_HASH_KEY": "pepper"},
        )
    address = f"http://127.0.0.1:{port}" if client_tls is None else f"https://localhost:{port}"
    served = GatewayProcess(address, process, log, client_tls)
    try:
        wait_until_ready(served)
        yield served
    finally:
        if process.poll() is None:
            served.kill()


def wait_until_ready(gateway: GatewayProcess, *, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert gateway.process.poll() is None, gateway.log.read_text()
        with contextlib.suppress(OSError):
            gateway.get("/health/ready")
            return
        time.sleep(0.1)
    raise AssertionError(gateway.log.read_text())
