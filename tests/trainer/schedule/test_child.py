"""Processes that are watched from outside."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from onlinerl.trainer.schedule.child import LATE, run_child
from tests.process_identity import start_time


def run(
    script: str,
    *,
    timeout_s: float = 30.0,
    grace_s: float = 5.0,
    stop: threading.Event | None = None,
) -> tuple[int, int]:
    """Exit code, and how often it was said that it is alive."""
    signs: list[float] = []
    code = run_child(
        [sys.executable, "-c", script],
        timeout_s=timeout_s,
        grace_s=grace_s,
        stop=stop or threading.Event(),
        alive=lambda: signs.append(time.monotonic()),
    )
    return code, len(signs)


def test_the_exit_code_is_the_childs() -> None:
    assert run("raise SystemExit(3)")[0] == 3


def test_a_child_that_is_late_is_asked_to_end() -> None:
    code, signs = run("import time; time.sleep(60)", timeout_s=1.0)

    assert code == LATE
    assert signs >= 1


def test_a_child_that_does_not_listen_is_killed() -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"

    stop = threading.Event()
    threading.Timer(2.0, stop.set).start()

    assert run(script, grace_s=0.2, stop=stop)[0] == -9


def test_a_stop_ends_the_child() -> None:
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()

    assert run("import time; time.sleep(60)", stop=stop)[0] == -15


def test_nothing_that_the_child_started_is_left(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "import subprocess, sys, pathlib; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"pathlib.Path({str(note)!r}).write_text(str(p.pid)); import os; os._exit(0)"
    )
    code, _ = run(script)

    assert code == 0
    _wait_for_the_end_of(int(note.read_text()))
    assert start_time(os.getpid()) is not None


def test_a_child_does_not_outlive_a_schedule_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = (
        f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}} '); "
        "time.sleep(60)"
    )
    schedule = (
        "import sys, threading; from onlinerl.trainer.schedule.child import run_child; "
        f"run_child([sys.executable, '-c', {child!r}], timeout_s=60, grace_s=5, "
        "stop=threading.Event(), alive=lambda: None)"
    )
    with subprocess.Popen([sys.executable, "-c", schedule]) as process:
        deadline = time.monotonic() + 60
        while not (note.exists() and note.read_text().endswith(" ")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()

    _wait_for_the_end_of(int(note.read_text()))


def _wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 60
    while start_time(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
