"""vLLM as a child process that leaves nothing behind.

vLLM starts workers of its own, so all of them live in one process group that ends as one.
"""

import logging
import os
import signal
import subprocess
import types

from onlinerl.process.parent_death import on_parent_death

logger = logging.getLogger(__name__)


class EngineProcess:
    """The engine and everything that it starts.

        STARTED --ends by itself--> DONE (its exit code)
           |--SIGTERM or SIGINT--> STOPPING --ends or stop_timeout_s--> DONE (0)

    Whatever way it ends, the whole process group is killed at last. When this process is killed
    itself, the engine gets SIGTERM: vLLM then ends its workers, which outlive a SIGKILL of it.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], *, stop_timeout_s: float
    ) -> None:
        self._command = command
        self._environment = environment
        self._stop_timeout_s = stop_timeout_s
        self._stopping = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start it and wait for its end; to be called from the main thread."""
        previous = {
            number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._child = subprocess.Popen(
                self._command,
                env=self._environment,
                start_new_session=True,
                preexec_fn=on_parent_death(signal.SIGTERM),
            )
            if self._stopping:  # a signal came before there was a child to pass it to
                self._signal_group(signal.SIGTERM)
            code = self._wait()
        finally:
            self._signal_group(signal.SIGKILL)
            for number, handler in previous.items():
                signal.signal(number, handler)
        return 0 if self._stopping else code

    def _wait(self) -> int:
        assert self._child is not None
        while not self._stopping:
            try:
                return self._child.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
        try:
            return self._child.wait(timeout=self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("engine did not stop in time and is killed")
            self._signal_group(signal.SIGKILL)
            return self._child.wait()

    def _stop(self, number: int, frame: types.FrameType | None) -> None:
        self._stopping = True
        self._signal_group(signal.SIGTERM)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._child is None:
            return
        try:
            os.killpg(self._child.pid, number)
        except ProcessLookupError:
            return
