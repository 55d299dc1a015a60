"""Which replica holds the prefix of a session. Pure functions of values.

Rendezvous hashing (Thaler and Ravishankar 1998): every replica has a score for a session, and the
highest score wins. A replica that comes or goes moves only the sessions that it wins or loses.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence


def choose_name(session_id: str, names: Iterable[str]) -> str:
    """The name that wins `session_id`, whatever the order of `names`, of which there is one."""
    return max(names, key=lambda name: (_score(session_id, name), name))


def _score(session_id: str, name: str) -> int:
    # The length keeps ("ab", "c") apart from ("a", "bc").
    text = f"{len(session_id)}:{session_id}{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_overloaded(load: int, loads: Sequence[int], *, factor: float, slack: int) -> bool:
    """Whether `load` with one more request is far above the mean of all `loads`, which include it.

    This is the bound of Mirrokni, Thorup and Zadimoghaddam (2016) plus `slack`: while few requests
    run, the mean says little, and moving a session costs its prefix cache.
    """
    mean = (sum(loads) + 1) / len(loads)
    return load + 1 > math.ceil(factor * mean) + slack
