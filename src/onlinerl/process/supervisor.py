"""Starts child processes, waits until they are healthy, restarts those that die, and stops all.

`commands/up.py` defines the children of the one-machine stack.
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onlinerl.errors import ServiceUnavailable
from onlinerl.process.parent_death import on_parent_death

logger = logging.getLogger(__name__)

_KILL_WAIT_S = 5.0
"""How long a killed process may take to end, seconds."""


@dataclass(frozen=True)
class Part:
    """One child process.

    Args:
        name: Name of the part and of its log file.
        command: The program and its arguments.
        healthy: Returns None when the part answers, else the reason why not, within seconds.
        address: Where a person finds the part; only printed.
        start_timeout_s: Seconds until the part must be healthy.
        stop_timeout_s: Seconds from SIGTERM until the part is killed.
        environment: Variables added to the supervisor's own.
    """

    name: str
    command: Sequence[str]
    healthy: Callable[[], str | None]
    address: str
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 20.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RestartPolicy:
    """How a part that died is restarted.

    Args:
        max_restarts: Restarts within `window_s` after which the supervisor gives up.
        window_s: Seconds after which a restart no longer counts.
        first_backoff_s: Seconds before the first restart; doubled for every further one.
        max_backoff_s: Longest back-off in seconds.
    """

    max_restarts: int = 5
    window_s: float = 300.0
    first_backoff_s: float = 1.0
    max_backoff_s: float = 30.0


class SupervisedPart:
    """A part with its process: stopped, running, or waiting for its next restart.

    Not thread-safe: only the loop of the supervisor calls it.
    """

    def __init__(
        self, part: Part, *, log_file: Path, policy: RestartPolicy, clock: Callable[[], float]
    ) -> None:
        self.part = part
        self.log_file = log_file
        self.restarts: list[float] = []
        self._policy = policy
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._start_again_at: float | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running child; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the child in a process group of its own, its output appended to the log file."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                list(self.part.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.part.environment},
                start_new_session=True,
                preexec_fn=on_parent_death(signal.SIGTERM),
            )
        self._start_again_at = None

    def check(self) -> None:
        """Notice that the child died, and restart it once its back-off is over.

        Raises:
            ServiceUnavailable: the child died more often than the policy allows.
        """
        now = self._clock()
        if self._process is not None and self._process.poll() is not None:
            self._plan_restart(now, exit_code=self._process.returncode)
        elif self._start_again_at is not None and now >= self._start_again_at:
            self.start()

    def _plan_restart(self, now: float, *, exit_code: int) -> None:
        _kill_group(self._process)  # children that the dead process left behind
        self._process = None
        self.restarts = [at for at in self.restarts if now - at < self._policy.window_s] + [now]
        count = len(self.restarts)
        if count > self._policy.max_restarts:
            raise ServiceUnavailable(
                f"{self.part.name} ended {count} times within {self._policy.window_s:.0f} s "
                f"(exit code {exit_code}); giving up. {self.log_tail()}"
            )
        backoff_s = min(self._policy.first_backoff_s * 2 ** (count - 1), self._policy.max_backoff_s)
        self._start_again_at = now + backoff_s
        logger.warning(
            "%s ended with exit code %s; starting it again in %.0f s (%s of %s). See %s",
            self.part.name, exit_code, backoff_s, count, self._policy.max_restarts, self.log_file,
        )  # fmt: skip

    def stop(self) -> None:
        """Send SIGTERM, wait up to `stop_timeout_s`, and kill the whole process group.

        A process that the kernel does not end, e.g. in a read from a storage that hangs, is logged
        and left behind.
        """
        self._start_again_at = None
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(self.part.stop_timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not stop in time; killing it", self.part.name)
        _kill_group(process)
        try:
            process.wait(_KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            logger.error("%s (process %d) outlives SIGKILL", self.part.name, process.pid)

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of its log as a sentence for an error message."""
        try:
            tail = self.log_file.read_text(errors="replace").splitlines()[-lines:]
        except FileNotFoundError:
            tail = []
        return f"Its log {self.log_file} ends: " + " | ".join(line.strip() for line in tail)


class Supervisor:
    """Starts parts in the given order, watches them, and stops them in reverse order."""

    def __init__(
        self,
        *,
        log_dir: Path,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_dir = log_dir
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self.parts: list[SupervisedPart] = []

    def start(self, part: Part) -> SupervisedPart:
        """Start a part and watch it from now on."""
        supervised = SupervisedPart(
            part,
            log_file=self._log_dir / f"{part.name}.log",
            policy=self._policy,
            clock=self._clock,
        )
        self.parts.append(supervised)
        supervised.start()
        return supervised

    def check(self) -> None:
        """Restart parts that died.

        Raises:
            ServiceUnavailable: a part died more often than the policy allows.
        """
        for supervised in self.parts:
            supervised.check()

    def wait_until_healthy(
        self,
        waiting: Sequence[SupervisedPart],
        *,
        sleep: Callable[[float], None] = time.sleep,
        on_healthy: Callable[[Part, float], None] = lambda part, seconds: None,
    ) -> None:
        """Return when all of these parts are healthy, and restart parts that die meanwhile.

        Args:
            waiting: The parts to wait for.
            sleep: Called with the seconds between two rounds of health checks.
            on_healthy: Called once per part with the seconds that it took.

        Raises:
            ServiceUnavailable: a part is not healthy within its `start_timeout_s`, or died more
                often than the policy allows.
        """
        start = self._clock()
        unhealthy = list(waiting)
        while unhealthy:
            self.check()
            for supervised in list(unhealthy):
                reason = supervised.part.healthy()
                waited_s = self._clock() - start
                if reason is None:
                    unhealthy.remove(supervised)
                    on_healthy(supervised.part, waited_s)
                elif waited_s > supervised.part.start_timeout_s:
                    raise ServiceUnavailable(
                        f"{supervised.part.name} is not healthy after {waited_s:.0f} s "
                        f"({reason}). {supervised.log_tail()}"
                    )
            if unhealthy:
                sleep(0.2)

    def stop(self) -> None:
        """Stop all parts, the last started first; parts that ended already are no error."""
        for supervised in reversed(self.parts):
            supervised.stop()
        self.parts.clear()


def _kill_group(process: "subprocess.Popen[bytes] | None") -> None:
    if process is None:
        return
    # The group is gone, or its number belongs to processes of another user by now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
