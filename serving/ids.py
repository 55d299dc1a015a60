"""Time-ordered ids: UUIDv7 (RFC 9562, section 5.7), new in the standard library of 3.14."""

import secrets
import time
from uuid import UUID

_VERSION_7 = 0x7 << 76
_VARIANT = 0b10 << 62


def uuid7(*, unix_ms: int | None = None) -> str:
    """A new id that sorts by creation time to the millisecond; 74 bits are random."""
    stamp = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    random_a = secrets.randbits(12) << 64
    return str(UUID(int=stamp << 80 | _VERSION_7 | random_a | _VARIANT | secrets.randbits(62)))
