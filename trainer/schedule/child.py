"""A training process, started, watched and ended from outside it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from onlinerl.process.parent_death import on_parent_death

logger = logging.getLogger(__name__)

POLL_S = 0.5

LATE = 124
"""Exit code of a command that was ended because it took too long, as of timeout(1)."""


def job_command(settings_file: Path) -> list[str]:
    """Run `trainer/job.py` with this interpreter."""
    return [sys.executable, "-m", "onlinerl.trainer.job", str(settings_file)]


def run_child(
    command: Sequence[str],
    *,
    timeout_s: float,
    grace_s: float,
    stop: threading.Event,
    alive: Callable[[], None],
) -> int:
    """Run a command in its own process group until it ends, is too late, or `stop` is set.

    It dies with the thread that calls this, even when that is killed.

    Args:
        command: what to run.
        timeout_s: after this it is ended.
        grace_s: between SIGTERM and SIGKILL.
        stop: ends it early.
        alive: called while waiting.

    Returns:
        The exit code; negative when a signal ended it, `LATE` when it was too late. Nothing of the
        group is left.
    """
    process = subprocess.Popen(
        command, start_new_session=True, preexec_fn=on_parent_death(signal.SIGKILL)
    )
    late = False
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None and not stop.wait(POLL_S):
            alive()
            if late := time.monotonic() > deadline:
                logger.error("a cycle took too long", extra={"timeout_s": timeout_s})
                break
    finally:
        _end(process, grace_s=grace_s)
    return LATE if late else process.returncode


def _end(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            logger.error("a training process did not end when asked", extra={"pid": process.pid})
    # The leader may be gone while something that it started is not.
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
