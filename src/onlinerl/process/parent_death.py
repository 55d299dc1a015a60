"""Children that end with their parent, even when that is killed (Linux prctl(2))."""

import ctypes
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Loaded in the parent: between fork and exec only calls are safe.
_LIBC = ctypes.CDLL(None)


def on_parent_death(number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn`: the child gets `number` when the thread that started it ends."""

    def ask_kernel() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)

    return ask_kernel
