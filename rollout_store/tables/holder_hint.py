"""A small file that says which process of this machine holds a lease."""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

_MAX_BYTES = 4096
_PAUSES_S = (0.02, 0.05, 0.1)
"""Between attempts to lock: who only looks at a hint locks it for a moment too."""


class Taking(NamedTuple):
    """Names one taking of one lease."""

    fence: int | None
    token: int | None
    """A random number. Tables that are created again, or put back, can reach the same fence."""


class HolderHint:
    """Who holds a lease, and whether that process still lives.

    The holder keeps the file under `flock` from before it takes the lease until after it gave it
    back, and the kernel ends that lock with the process. So a content that nobody locks was left by
    a process that is gone. The hint is not the lease: it gives words to people, and lets a
    successor on the same machine follow a killed process without waiting for the lease to expire.

    The content is written in place, because a replaced file would not carry the lock. When half of
    it was written it is no valid JSON and counts for nothing.

    Args:
        path: The file; its folder is created. Only its owner can read it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_locked(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def lock(self) -> bool:
        """Lock the file unless another process has it, or the file system has no locks."""
        if self._descriptor is not None:
            return True
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            logger.warning("cannot open the hint %s: %s", self._path, error)
            return False
        for pause_s in (*_PAUSES_S, None):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if pause_s is not None:
                    time.sleep(pause_s)
            except OSError as error:
                logger.warning("cannot lock the hint %s: %s", self._path, error)
                break
            else:
                self._descriptor = descriptor
                return True
        os.close(descriptor)
        return False

    def write(self, taking: Taking) -> None:
        """Say that this process holds the lease; needs the lock and a lease that is taken."""
        if self._descriptor is None:
            return
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "fence": taking.fence,
            "token": taking.token,
            "lock": _lock_id(self._descriptor),
        }
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(content).encode(), 0)
        except OSError as error:
            logger.warning("cannot write the hint %s: %s", self._path, error)

    def abandoned(self) -> Taking | None:
        """The taking of a process of this machine that is gone; None when that is not certain.

        The content counts only in the very file that was locked when it was written, under the same
        run of the same kernel. A copied folder, a shared file system or a restarted machine proves
        nothing about the process.
        """
        if self._descriptor is not None:
            return _abandoned(self._descriptor)
        with self._look() as (descriptor, is_locked):
            return None if descriptor is None or is_locked else _abandoned(descriptor)

    def release(self) -> None:
        """Unlock the file; the content stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> str | None:
        """The process that holds the lock, in words; None when no other process does."""
        if self._descriptor is not None:
            return None
        with self._look() as (descriptor, is_locked):
            if descriptor is None or not is_locked:
                return None
            return _describe(_parse(os.pread(descriptor, _MAX_BYTES, 0)))

    @contextmanager
    def _look(self) -> Iterator[tuple[int | None, bool]]:
        """The open file, if there is one, and whether a process holds it.

        While the block runs nobody can lock it anew, so that its content is not about to change.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except OSError:  # no such file, or none that can be read: nothing is known
            yield None, False
            return
        try:
            is_locked = _is_locked(descriptor)
            yield (None if is_locked is None else descriptor), bool(is_locked)
        finally:
            os.close(descriptor)


def _is_locked(descriptor: int) -> bool | None:
    """Whether a process holds the lock; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _abandoned(descriptor: int) -> Taking | None:
    content, lock_id = _parse(os.pread(descriptor, _MAX_BYTES, 0)), _lock_id(descriptor)
    if content is None or lock_id is None or content.get("lock") != lock_id:
        return None
    fence, token = content.get("fence"), content.get("token")
    if not isinstance(fence, int) or not isinstance(token, int):
        return None
    return Taking(fence, token)


def _parse(content: bytes) -> dict[str, object] | None:
    try:
        parsed = json.loads(content)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _describe(content: dict[str, object] | None) -> str:
    try:
        if content is not None:
            return f"process {content['pid']} on {content['host']} since {content['since']}"
    except KeyError:
        pass
    return "a process that is starting"


def _lock_id(descriptor: int) -> str | None:
    """Names an open file in this run of the kernel; None where the kernel has no boot id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    found = os.fstat(descriptor)
    return f"{boot}:{found.st_dev}:{found.st_ino}"
