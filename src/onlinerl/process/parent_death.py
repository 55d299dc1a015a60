"""Ends child processes with their parent, even when the parent is killed (Linux prctl(2))."""

import ctypes
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
# Loaded in the parent, because loading a library between fork and exec is not safe.
_LIBC = ctypes.CDLL(None)


def on_parent_death(number: signal.Signals) -> Callable[[], None]:
    """Make a `preexec_fn` for `subprocess.Popen`.

    The child gets the signal when the thread that started it ends. Start children from a thread
    that lives as long as the process.
    """

    def request_signal() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)

    return request_signal
