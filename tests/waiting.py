"""Waiting for what happens elsewhere: for a condition, never for a time."""

import time
from collections.abc import Callable


def until(
    condition: Callable[..., object],
    *,
    what: str = "the condition came true",
    timeout_s: float = 120.0,
    every_s: float = 0.02,
) -> None:
    """Look every `every_s` seconds; fail with `what` when it is not so within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)
