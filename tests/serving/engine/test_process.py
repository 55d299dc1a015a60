import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PARENT = """
import os, sys
from onlinerl.serving.engine.process import EngineProcess
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
    deadline = time.monotonic() + 60
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

    assert process.wait(timeout=60) == 7
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_engine_and_its_workers(number: signal.Signals) -> None:
    process = start(
        """
        import subprocess, sys, time
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(worker.pid, flush=True)
        time.sleep(600)
        """
    )
    worker = int(first_line(process))
    process.send_signal(number)

    assert process.wait(timeout=60) == 0
    assert is_gone(worker)
    assert process.stdout is not None
    process.stdout.close()


def test_an_engine_that_ignores_the_signal_is_killed() -> None:
    process = start(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(600)
        """
    )
    engine = int(first_line(process))
    process.terminate()

    assert process.wait(timeout=60) == 0
    assert is_gone(engine)
    assert process.stdout is not None
    process.stdout.close()


def test_an_engine_does_not_outlive_a_command_that_was_killed() -> None:
    process = start(
        """
        import os, time
        print(os.getpid(), flush=True)
        time.sleep(600)
        """
    )
    engine = int(first_line(process))
    process.kill()
    process.wait(timeout=60)

    assert is_gone(engine)
    assert process.stdout is not None
    process.stdout.close()


def test_workers_of_an_engine_that_crashed_are_not_left_behind() -> None:
    process = start(
        """
        import os, subprocess, sys
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(worker.pid, flush=True)
        os._exit(3)
        """
    )
    worker = int(first_line(process))

    assert process.wait(timeout=60) == 3
    assert is_gone(worker)
    assert process.stdout is not None
    process.stdout.close()
