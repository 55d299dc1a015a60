"""Starts a training process, watches it and ends it."""

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
"""Exit code of a command that took too long, as timeout(1) has it."""


def job_command(settings_file: Path) -> list[str]:
    """The command line of a training process, with this interpreter."""
    return [sys.executable, "-m", "onlinerl.trainer.job", str(settings_file)]


def run_child(
    command: Sequence[str],
    *,
    timeout_s: float,
    grace_s: float,
    stop: threading.Event,
    alive: Callable[[], None],
) -> int:
    """Run a command in its own process group until it ends, takes too long, or `stop` is set.

    No process of the group is left afterwards. The command also dies with the calling thread, even
    when that is killed.

    Args:
        command: The command line.
        timeout_s: Seconds after which the command is ended.
        grace_s: Seconds between SIGTERM and SIGKILL.
        stop: Ends the command early.
        alive: Called every `POLL_S` while waiting.

    Returns:
        The exit code; negative when a signal ended the command, `LATE` when it took too long.
    """
    process = subprocess.Popen(
        command, start_new_session=True, preexec_fn=on_parent_death(signal.SIGKILL)
    )
    is_late = False
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None and not stop.wait(POLL_S):
            alive()
            if is_late := time.monotonic() > deadline:
                logger.error("a cycle took too long", extra={"timeout_s": timeout_s})
                break
    finally:
        _end(process, grace_s=grace_s)
    return LATE if is_late else process.returncode


def _end(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            logger.error("a training process did not end when asked", extra={"pid": process.pid})
    # The leader may have ended while a process that it started has not.
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
