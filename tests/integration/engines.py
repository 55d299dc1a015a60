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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from onlinerl.secret_names import ENGINE_SECRET

START_TIMEOUT_S = 240.0
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Engine:
    """A running `onlinerl engine`."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path
    pace: Path
    """File with the seconds between two tokens; see `pacing`."""

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
def engine(
    folder: Path, *, model: Path, port: int, secret: str | None = None, **options: object
) -> Iterator[Engine]:
    """`onlinerl engine` on a free port; on exit it is told to stop and has to.

    With a `secret` it listens on every address, behind its guard.
    """
    config = folder / "engine.toml"
    lines = ["[policy]", f"base_model = {json.dumps(str(model))}", "[engine]", f"port = {port}"]
    defaults: dict[str, object] = {
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "extra_args": ["--logits-processors", "tests.integration.pacing:Pace"],
    }
    if secret is not None:
        defaults |= {"host": "0.0.0.0", "allow_remote": True}
    for key, value in (defaults | options).items():
        lines.append(f"{key} = {_toml(value)}")
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
            }
            | ({} if secret is None else {ENGINE_SECRET: secret}),
        )
    started = Engine(f"http://127.0.0.1:{port}", process, log, pace)
    try:
        _wait_until_healthy(started, secret=secret)
        yield started
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _wait_until_healthy(started: Engine, *, secret: str | None) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if started.process.poll() is not None:
            break
        if _is_healthy(started.url, secret=secret):
            return
        time.sleep(0.5)
    raise AssertionError(f"no healthy engine: {started.log.read_text(errors='replace')[-3000:]}")


def _is_healthy(url: str, *, secret: str | None) -> bool:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    request = urllib.request.Request(f"{url}/health", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=2):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
