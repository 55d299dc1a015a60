"""Keeps child processes running: starts, waits for health, restarts with back-off, stops all.

Knows nothing of what the children are; `stack.py` says that.
"""

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


@dataclass(frozen=True)
class Part:
    """One child process.

    Args:
        name: Also the name of its log file.
        command: Arguments, the program first.
        healthy: Returns None when it answers, else why not; must return within seconds.
        address: Where a person finds it.
        start_timeout_s: How long it may take until it is healthy.
        stop_timeout_s: How long it gets to stop by itself.
        environment: Added to the supervisor's own.
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
    """A part that died is started again after 1, 2, 4 … seconds, up to `max_restarts` times.

    Restarts longer ago than `window_s` are forgotten.
    """

    max_restarts: int = 5
    window_s: float = 300.0
    first_backoff_s: float = 1.0
    max_backoff_s: float = 30.0


class SupervisedPart:
    """STOPPED -> RUNNING -> (died) BACKING_OFF -> RUNNING … -> given up or STOPPED.

    Only the supervisor's loop moves it; `RestartPolicy` bounds the restarts.
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
        """Of the running child."""
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
        """Restart the child when it died and its back-off is over.

        Raises:
            ServiceUnavailable: when it died more often than the policy allows.
        """
        now = self._clock()
        if self._process is not None and self._process.poll() is not None:
            self._plan_restart(now, exit_code=self._process.returncode)
        elif self._start_again_at is not None and now >= self._start_again_at:
            self.start()

    def _plan_restart(self, now: float, *, exit_code: int) -> None:
        _end_group(self._process, signal.SIGKILL)  # what a dead parent left behind
        self._process = None
        self.restarts = [at for at in self.restarts if now - at < self._policy.window_s] + [now]
        count = len(self.restarts)
        if count > self._policy.max_restarts:
            raise ServiceUnavailable(
                f"{self.part.name} ended {count} times within {self._policy.window_s:.0f} s "
                f"(exit code {exit_code}); giving up. {self.last_words()}"
            )
        backoff_s = min(self._policy.first_backoff_s * 2 ** (count - 1), self._policy.max_backoff_s)
        self._start_again_at = now + backoff_s
        logger.warning(
            "%s ended with exit code %s; starting it again in %.0f s (%s of %s). See %s",
            self.part.name, exit_code, backoff_s, count, self._policy.max_restarts, self.log_file,
        )  # fmt: skip

    def stop(self) -> None:
        """Ask the child to end, wait, and end its whole group."""
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
        _end_group(process, signal.SIGKILL)
        process.wait(5)

    def last_words(self, lines: int = 5) -> str:
        """The end of its log, for an error message."""
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
        """Restart what died; see `SupervisedPart.check`."""
        for supervised in self.parts:
            supervised.check()

    def wait_until_healthy(
        self,
        waiting: Sequence[SupervisedPart],
        *,
        sleep: Callable[[float], None] = time.sleep,
        on_healthy: Callable[[Part, float], None] = lambda part, seconds: None,
    ) -> None:
        """Return when all answer; parts that die meanwhile are restarted.

        Raises:
            ServiceUnavailable: when one is not healthy within its `start_timeout_s`.
        """
        began = self._clock()
        left = list(waiting)
        reasons: dict[str, str] = {}
        while left:
            self.check()
            for supervised in list(left):
                reason = supervised.part.healthy()
                waited_s = self._clock() - began
                if reason is None:
                    left.remove(supervised)
                    on_healthy(supervised.part, waited_s)
                    continue
                reasons[supervised.part.name] = reason
                if waited_s > supervised.part.start_timeout_s:
                    raise ServiceUnavailable(
                        f"{supervised.part.name} is not healthy after {waited_s:.0f} s "
                        f"({reason}). {supervised.last_words()}"
                    )
            if left:
                sleep(0.2)

    def stop(self) -> None:
        """Stop all, the last started first; never raises for one that is gone."""
        for supervised in reversed(self.parts):
            supervised.stop()
        self.parts.clear()


def _end_group(process: "subprocess.Popen[bytes] | None", number: signal.Signals) -> None:
    if process is None:
        return
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # the whole group is gone already
