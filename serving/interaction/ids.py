"""Ids that are made here, and the form of those that callers choose.

The former are time-ordered: UUIDv7 (RFC 9562, section 5.7), new in the standard library of 3.14.
"""

import re
import secrets
import time
from collections.abc import Mapping
from uuid import UUID

from onlinerl.errors import RequestRefused

_SESSION_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

_VERSION_7 = 0x7 << 76
_VARIANT = 0b10 << 62
_MASK_62 = (1 << 62) - 1


def uuid7(*, unix_ms: int | None = None) -> str:
    """A new id that sorts by creation time to the millisecond; 74 bits are random."""
    stamp = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    bits = secrets.randbits(74)
    random_a, random_b = bits >> 62 << 64, bits & _MASK_62
    return str(UUID(int=stamp << 80 | _VERSION_7 | random_a | _VARIANT | random_b))


def check_session_id(session_id: str, *, param: str) -> str:
    """The session id of a caller, as it is.

    Raises:
        RequestRefused: naming `param`, when it is not plain.
    """
    if _SESSION_ID.fullmatch(session_id) is None:
        raise RequestRefused(
            f"{param}: give 1 to 128 letters, digits or any of _ . : -", 400, param
        )
    return session_id


def session_of(metadata: Mapping[str, str]) -> str | None:
    """`session_id` in the metadata of a body, or None.

    Raises:
        RequestRefused: when it is not plain.
    """
    session_id = metadata.get("session_id")
    if session_id is None:
        return None
    return check_session_id(session_id, param="metadata.session_id")
