"""A real engine for integration tests, started as a user starts it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 240.0
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Engine:
    """A running `onlinerl engine`."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    pace: Path
    """See `pacing`."""

    @contextlib.contextmanager
    def paced(self, step_s: float = 0.02) -> Iterator[None]:
        """Inside, every decoding step takes at least `step_s`."""
        staging = self.pace.with_suffix(".tmp")
        staging.write_text(str(step_s))
        staging.rename(self.pace)  # the engine never reads half a number
        try:
            yield
        finally:
            self.pace.unlink()


@contextlib.contextmanager
def engine(folder: Path, *, model: Path, port: int, **options: object) -> Iterator[Engine]:
    """`onlinerl engine` on a free port; on exit it is told to stop and has to."""
    config = folder / "engine.toml"
    lines = ["[policy]", f"base_model = {json.dumps(str(model))}", "[engine]", f"port = {port}"]
    defaults = {
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "extra_args": ["--logits-processors", "tests.integration.pacing:Pace"],
    }
    for key, value in (defaults | options).items():
        lines.append(f"{key} = {json.dumps(value)}")
    config.write_text("\n".join(lines))
    log, pace = folder / "engine.log", folder / "pace"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "onlinerl.cli", "engine", "--config", str(config)],
            stdout=output,
            stderr=output,
            env=dict(os.environ)
            | {
                "OMP_NUM_THREADS": "2",
                "ONLINERL_TEST_PACE": str(pace),
                "PYTHONPATH": str(REPOSITORY),
            },
        )
    started = Engine(f"http://127.0.0.1:{port}", process, log, pace)
    try:
        _wait_until_healthy(started)
        yield started
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def _wait_until_healthy(started: Engine) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if started.process.poll() is not None:
            break
        if _is_healthy(started.url):
            return
        time.sleep(0.5)
    raise AssertionError(f"no healthy engine: {started.log.read_text(errors='replace')[-3000:]}")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
