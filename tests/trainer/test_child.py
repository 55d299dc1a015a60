"""Processes that are watched from outside."""

import os
import sys
import threading
import time
from pathlib import Path

from onlinerl.trainer.child import run_child
from onlinerl.trainer.process import start_time


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

    assert code == -15
    assert signs >= 1


def test_a_child_that_does_not_listen_is_killed() -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"

    assert run(script, timeout_s=2.0, grace_s=0.2)[0] == -9


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
    grandchild = int(note.read_text())
    deadline = time.monotonic() + 10
    while start_time(grandchild) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert start_time(os.getpid()) is not None
