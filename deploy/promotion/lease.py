"""One controller per data folder, held by a lock of the kernel that ends with its process."""

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Self

from onlinerl.errors import LeaseHeld


class Lease:
    """The right to gate and promote.

    A lock on an open file: it cannot outlive its holder, so nothing has to expire and nobody has
    to take over. The file's content only says who holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "controller.lock"
        self._stream: IO[str] | None = None

    def __enter__(self) -> Self:
        """Take it.

        Raises:
            LeaseHeld: when another process has it; the message says which.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        stream = self._file.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.close()
            raise LeaseHeld(f"a deploy controller runs already: {self.holder()}") from error
        stream.truncate(0)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
        stream.write(json.dumps(holder))
        stream.flush()
        self._stream = stream
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def holder(self) -> str | None:
        """Who holds it, or None when nobody does."""
        if not self._file.exists():
            return None
        with self._file.open("r", encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _described(stream.read())
        return None


def _described(content: str) -> str:
    """As a person reads it; the holder writes its line right after it took the lock."""
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError):
        return "a process that is starting"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
