"""Keeps a vLLM worker on a CPU alive when a seeded prompt is read in several pieces.

A piece that is not the last one samples a token that is thrown away, and vLLM then sets the
request's random generator back. Generators on a CPU cannot be set back: the worker fails, and the
engine with it, for one request with a `seed`. Here they are left where they are. The same seed
then gives the same answer only if the prompt is read in as many pieces.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def leave_generators_alone(runner: Any) -> None:  # noqa: ANN401 a class of vLLM
    """Patch a model runner class of vLLM; calling it again does nothing.

    Raises:
        AttributeError: when vLLM's runner has no such step, so that its version is looked at again.
    """
    original = runner._bookkeeping_sync
    if not getattr(original, "leaves_generators_alone", False):
        runner._bookkeeping_sync = _patched(original)


def _patched(original: Callable[..., Any]) -> Callable[..., Any]:
    def bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 vLLM's own
        batch = self.input_batch
        discarded = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]
        held = {
            index: batch.generators.pop(index)
            for index in map(int, discarded)
            if index in batch.generators
        }
        try:
            return original(self, *args, **kwargs)
        finally:
            batch.generators.update(held)

    bookkeeping_sync.leaves_generators_alone = True  # type: ignore[attr-defined]
    return bookkeeping_sync
