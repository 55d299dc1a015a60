"""Lets the processes of vLLM on a CPU wait for each other without taking a core each.

Engine core and worker hand over every step through shared memory, and each looks at it without
pause while the other works. On GPU machines nobody misses those cores. Where the same cores sample,
train and serve, whatever else runs there is starved. Here they sleep between two looks.
"""

import time
from types import ModuleType

PAUSE_S = 50e-6
"""Between two looks. A step on a CPU takes milliseconds."""


def wait_with_pauses(shm_broadcast: ModuleType) -> None:
    """Patch vLLM's module of that name; calling it again does nothing.

    Raises:
        AttributeError: when vLLM does not wait so any more, so that its version is looked at again.
    """
    _ = shm_broadcast.sched_yield
    shm_broadcast.sched_yield = pause  # type: ignore[attr-defined]


def pause() -> None:
    """Let others have the core."""
    time.sleep(PAUSE_S)
