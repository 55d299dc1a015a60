"""Which sessions are held out: never trained on, so that gates can measure on them.

A hash of the session id decides. So every process comes to the same decision on its own, a session
is held out with all of its turns, and a larger fraction only adds sessions.
"""

import hashlib

_HEX_DIGITS = 8
_BUCKETS: int = 16**_HEX_DIGITS


def is_heldout(session_id: str, *, fraction: float) -> bool:
    """Whether the session belongs to the held-out `fraction` (0 to 1)."""
    digest = hashlib.md5(session_id.encode(), usedforsecurity=False).hexdigest()
    return int(digest[:_HEX_DIGITS], 16) / _BUCKETS < fraction


def is_heldout_sql(column: str, *, fraction: float) -> str:
    """The same decision as a DuckDB expression over the session id in `column`."""
    prefix = f"substr(md5({column}), 1, {_HEX_DIGITS})"
    return f"(('0x' || {prefix})::BIGINT::DOUBLE / {_BUCKETS}.0 < {float(fraction)!r}::DOUBLE)"
