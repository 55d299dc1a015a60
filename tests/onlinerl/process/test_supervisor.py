"""Children are restarted with back-off, given up with a message, and never left running."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onlinerl.errors import ServiceUnavailable
from onlinerl.process import supervisor as supervisor_module
from onlinerl.process.supervisor import Part, RestartPolicy, Supervisor
from tests.waiting import until

QUICK = RestartPolicy(max_restarts=2, window_s=60, first_backoff_s=0.01)


class Clock:
    """Advances only when a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def python_part(code: str, **changes: object) -> Part:
    values: dict[str, object] = {
        "name": "child",
        "command": [sys.executable, "-c", code],
        "healthy": lambda: None,
        "address": "nowhere",
        "stop_timeout_s": 5.0,
    }
    return Part(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(log_dir=tmp_path, policy=QUICK)
    yield supervisor
    supervisor.stop()


def test_a_part_that_dies_is_restarted(supervisor: Supervisor) -> None:
    child = supervisor.start(python_part("import time; time.sleep(60)"))
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)

    def restarted() -> bool:
        supervisor.check()
        return child.pid not in (None, first)

    until(restarted)
    assert len(child.restarts) == 1


def test_a_part_that_keeps_dying_is_given_up_with_the_end_of_its_log(
    supervisor: Supervisor,
) -> None:
    supervisor.start(python_part("print('no such model'); raise SystemExit(3)"))

    with pytest.raises(ServiceUnavailable, match=r"ended 3 times.*exit code 3.*no such model"):
        until(lambda: supervisor.check() is not None)  # type: ignore[func-returns-value]


def test_old_restarts_are_forgotten(tmp_path: Path) -> None:
    clock = Clock()
    supervisor = Supervisor(log_dir=tmp_path, policy=QUICK, clock=clock)
    child = supervisor.start(python_part("raise SystemExit(1)"))
    for _ in range(5):
        until(lambda: child.pid is not None and psutil.Process(child.pid).status() == "zombie")
        supervisor.check()
        clock.now += 100
        supervisor.check()

    assert len(child.restarts) == 1
    supervisor.stop()


def test_stopping_ends_grandchildren_too(supervisor: Supervisor, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    child = supervisor.start(python_part(code))
    until(lambda: bool(child.log_file.read_text().strip()))
    grandchild = int(child.log_file.read_text())
    supervisor.stop()

    until(lambda: not psutil.pid_exists(grandchild))


DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); time.sleep(600)"
)


def test_a_part_that_outlives_its_kill_is_logged_and_the_others_are_stopped(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = supervisor.start(python_part("import time; time.sleep(600)"))
    stuck = supervisor.start(python_part(DEAF, name="stuck", stop_timeout_s=0.05))
    until(lambda: "deaf" in stuck.log_file.read_text())
    processes = first._process, stuck._process
    assert processes[0] is not None
    assert processes[1] is not None
    with monkeypatch.context() as patched:
        patched.setattr(supervisor_module, "_KILL_WAIT_S", 0.05)
        patched.setattr(supervisor_module, "_kill_group", lambda process: None)
        supervisor.stop()
    is_left = processes[1].poll() is None
    processes[1].kill()
    processes[1].wait()

    assert is_left
    assert processes[0].poll() is not None
    assert f"stuck (process {processes[1].pid}) outlives SIGKILL" in caplog.text


def test_a_part_that_ignores_sigterm_is_killed(supervisor: Supervisor) -> None:
    child = supervisor.start(python_part(DEAF, stop_timeout_s=0.2))
    until(lambda: "deaf" in child.log_file.read_text())
    pid = child.pid
    assert pid is not None
    supervisor.stop()

    assert not psutil.pid_exists(pid)


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from onlinerl.process import supervisor as supervisor_module
from onlinerl.process.supervisor import Part, Supervisor
import sys
supervisor = Supervisor(log_dir=pathlib.Path({str(tmp_path)!r}))
command = [sys.executable, "-c", "import time; time.sleep(600)"]
child = supervisor.start(Part(name="c", command=command, healthy=lambda: None, address=""))
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_waiting_reports_healthy_parts_and_fails_for_an_unhealthy_one(tmp_path: Path) -> None:
    clock = Clock()
    supervisor = Supervisor(log_dir=tmp_path, policy=QUICK, clock=clock)
    sleeper = "import time; time.sleep(60)"
    good = supervisor.start(python_part(sleeper, name="good"))
    bad = supervisor.start(python_part(sleeper, name="bad", healthy=lambda: "refused"))
    seen: list[str] = []

    def sleep(seconds: float) -> None:
        clock.now += 10

    with pytest.raises(ServiceUnavailable, match=r"bad is not healthy after .* \(refused\)"):
        supervisor.wait_until_healthy(
            [good, bad], sleep=sleep, on_healthy=lambda one, seconds: seen.append(one.name)
        )
    assert seen == ["good"]
    supervisor.stop()
