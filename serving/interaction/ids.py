"""Ids that are made here, and the form of ids that callers choose."""

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from uuid import UUID

from onlinerl.errors import RequestRefused

_SESSION_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

_VERSION_7 = 0x7 << 76
_VARIANT = 0b10 << 62
_MASK_62 = (1 << 62) - 1
_RANDOM_BITS = 74
_SEED_BITS = 73
"""One bit less than there is room for, so that a new millisecond does not begin near overflow."""
_STEP_BITS = 56
"""Random bits that every further id of a millisecond adds."""
_MAX_CLOCK_MS = (1 << 48) - (1 << 32)
"""Year 10889. Later readings count as this one, which leaves stamps for counters that overflow."""


class IdGenerator:
    """Makes UUIDv7s (RFC 9562, section 5.7), each greater than the one before. Thread-safe.

    The 74 bits beside the time are a monotonic random counter (section 6.2, method 2): random when
    the millisecond is new, then raised by a random number of up to 56 bits. An id therefore has at
    least 56 bits that the ids before it do not tell. When the clock stands still or steps back, the
    time of the last id is used on; when the counter overflows, that time moves on by 1 ms.

    The time in an id is thus never earlier than the clock, and may be later. Nothing is computed
    from it: an event carries its own `served_at`.

    Args:
        clock_ms: Unix time, milliseconds.
    """

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._stamp_ms = -1
        self._counter = 0

    def new_id(self) -> str:
        """An id that is greater than every one before, as text and as a number."""
        now_ms = min(max(self._clock_ms(), 0), _MAX_CLOCK_MS)
        with self._lock:
            if now_ms > self._stamp_ms:
                self._begin(now_ms)
            else:
                self._counter += 1 + secrets.randbits(_STEP_BITS)
                if self._counter >> _RANDOM_BITS:
                    self._begin(self._stamp_ms + 1)
            stamp_ms, counter = self._stamp_ms, self._counter
        random_a, random_b = counter >> 62 << 64, counter & _MASK_62
        return str(UUID(int=stamp_ms << 80 | _VERSION_7 | random_a | _VARIANT | random_b))

    def restart_in_child(self) -> None:
        """Make ids that the parent does not make; called in a process that was just forked."""
        # Another thread of the parent may have held the lock.
        self._lock = threading.Lock()
        self._begin(self._stamp_ms + 1)

    def _begin(self, stamp_ms: int) -> None:
        self._stamp_ms = stamp_ms
        self._counter = secrets.randbits(_SEED_BITS)


_PROCESS_IDS = IdGenerator(lambda: time.time_ns() // 1_000_000)
os.register_at_fork(after_in_child=_PROCESS_IDS.restart_in_child)


def uuid7() -> str:
    """A new id, greater than every id that this process made before; see `IdGenerator`."""
    return _PROCESS_IDS.new_id()


def check_session_id(session_id: str, *, param: str) -> str:
    """The session id that a caller chose, unchanged.

    Raises:
        RequestRefused: when it is not 1 to 128 letters, digits or `_.:-`; the error names `param`.
    """
    if _SESSION_ID.fullmatch(session_id) is None:
        raise RequestRefused(
            f"{param}: give 1 to 128 letters, digits or any of _ . : -", 400, param
        )
    return session_id


def session_of(metadata: Mapping[str, str]) -> str | None:
    """The `session_id` in the metadata of a body; None when there is none.

    Raises:
        RequestRefused: as `check_session_id`.
    """
    session_id = metadata.get("session_id")
    if session_id is None:
        return None
    return check_session_id(session_id, param="metadata.session_id")
