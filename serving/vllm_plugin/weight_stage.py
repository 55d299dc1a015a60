"""The host copy of the weights that serve, and the version that is made ready beside it.

Runs inside an engine worker but knows neither vLLM nor torch: fetching, verifying and decoding
happen in a background thread while the model serves, so that a commit only has to copy.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from onlinerl.deploy.weights.delta import HostTensor, Weights, digest, plan, resolve
from onlinerl.errors import WeightsError

logger = logging.getLogger(__name__)

_NICENESS = 10


class StageRequest(BaseModel):
    """What a worker is asked to make ready."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path
    """Folder of the policy's published versions, on this worker's machine."""
    version: int


@dataclass(frozen=True)
class Staged:
    """A verified version, ready to be loaded."""

    version: int
    weights: Weights
    changed: frozenset[str]
    """Names of tensors that differ from the weights it was staged over; all when none are known."""
    base_version: int | None
    num_bytes: int
    """Bytes of payload that were read."""
    stage_ms: float


class WeightStage:
    """Weights of one worker.

        IDLE --stage()--> STAGING --thread--> STAGED --apply()--> APPLIED --settle()--> IDLE
                              |                                      |
                              +--error--> FAILED --stage()--> ...    +--revert()--> IDLE (as before)

    `stage`, `apply`, `revert` and `settle` are called by the worker's one RPC thread; the
    background thread only ever writes its result under the lock. There is at most one background
    thread: a second request while one runs is refused.
    """

    def __init__(self, weights: Weights, *, version: int | None = None) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._weights = dict(weights)
        self._version = version
        self._staged: Staged | None = None
        self._undo: tuple[int | None, dict[str, HostTensor]] | None = None
        self._target: int | None = None
        self._error: str | None = None
        self._digest: str | None = None
        self._apply_ms: float | None = None

    def stage(self, request: StageRequest) -> None:
        """Start to make a version ready; `status` tells how it went.

        Raises:
            WeightsError: while another request runs, or an applied version is not settled.
        """
        if self._undo is not None:
            raise WeightsError(f"version {self._version} is applied and not settled yet")

        def job() -> None:
            staged = self._resolve(request)
            with self._lock:
                self._staged = staged

        # Dropped first: of two staged versions nobody could tell which a commit means.
        self._start(job, before=lambda: self._forget(target=request.version))

    def start_checksum(self) -> None:
        """Start to hash the host copy of what serves; `status` gives the digest.

        Raises:
            WeightsError: while another request runs.
        """

        def job() -> None:
            value = digest({name: tensor.sha256() for name, tensor in self._weights.items()})
            with self._lock:
                self._digest = value

        self._digest = None
        self._start(job, before=lambda: None)

    def apply(self, version: int, load: Callable[[Staged], None]) -> None:
        """Let `load` put the staged version into the model; on failure everything is as before.

        Raises:
            WeightsError: when another version, or none, is staged.
        """
        with self._lock:
            staged = self._staged
        if staged is None or staged.version != version:
            found = "nothing" if staged is None else f"version {staged.version}"
            raise WeightsError(f"version {version} is to be applied but {found} is staged")
        if staged.base_version != self._version:
            raise WeightsError(f"version {version} was staged over {staged.base_version}")
        started = time.monotonic()
        load(staged)
        self._apply_ms = (time.monotonic() - started) * 1000
        with self._lock:
            self._undo = (self._version, self._weights)
            self._weights, self._version = dict(staged.weights), version
            self._staged = self._digest = None

    def undo(self) -> Weights | None:
        """The weights before the last `apply`, while it is not settled."""
        return None if self._undo is None else self._undo[1]

    def revert(self) -> None:
        """Take back the last `apply`: the caller has put `undo()` into the model again."""
        assert self._undo is not None
        with self._lock:
            (self._version, self._weights), self._undo = self._undo, None
            self._digest = None

    def settle(self) -> None:
        """The applied version is final; the weights before it are let go."""
        self._undo = None

    @property
    def weights(self) -> Weights:
        """The host copy of what is in the model."""
        return self._weights

    @property
    def version(self) -> int | None:
        """Version of what is in the model; None for the checkpoint that it started with."""
        return self._version

    def status(self) -> dict[str, object]:
        """Plain values for a remote caller."""
        with self._lock:
            staged = self._staged
            running = self._thread is not None and self._thread.is_alive()
            return {
                "state": self._state(running=running),
                "version": self._version,
                "settled": self._undo is None,
                "target": self._target,
                "error": self._error,
                "digest": self._digest,
                "stage_ms": None if staged is None else staged.stage_ms,
                "num_bytes": None if staged is None else staged.num_bytes,
                "num_changed_tensors": None if staged is None else len(staged.changed),
                "apply_ms": self._apply_ms,
            }

    def _state(self, *, running: bool) -> str:
        if running:
            return "busy"
        if self._error is not None:
            return "failed"
        return "staged" if self._staged is not None else "idle"

    def _forget(self, *, target: int) -> None:
        self._staged, self._target = None, target

    def _start(self, job: Callable[[], None], *, before: Callable[[], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise WeightsError("another version is being staged or hashed")
        with self._lock:
            before()
            self._error = None
        self._thread = threading.Thread(target=self._run, args=(job,), name="weights", daemon=True)
        self._thread.start()

    def _run(self, job: Callable[[], None]) -> None:
        _yield_cores_to_serving()
        try:
            job()
        except Exception as error:
            logger.warning("weights were not made ready", exc_info=True)
            with self._lock:
                self._error = f"{type(error).__name__}: {error}"

    def _resolve(self, request: StageRequest) -> Staged:
        started = time.monotonic()
        root, base, current = request.root, self._weights, self._version
        steps = plan(root, target=request.version, current=current)
        weights = resolve(root, target=request.version, current=current, base=base)
        # A set of names that differs cannot be loaded in part.
        changed = _changed(base, weights) if base.keys() == weights.keys() else frozenset(weights)
        return Staged(
            version=request.version,
            weights=weights,
            changed=changed,
            base_version=current,
            num_bytes=sum(step.num_bytes for step in steps),
            stage_ms=(time.monotonic() - started) * 1000,
        )


def _changed(old: Mapping[str, HostTensor], new: Mapping[str, HostTensor]) -> frozenset[str]:
    return frozenset(
        name
        for name, tensor in new.items()
        if tensor is not old[name]
        and (tensor.dtype != old[name].dtype or (tensor.bits != old[name].bits).any())
    )


def _yield_cores_to_serving() -> None:
    """On Linux niceness belongs to the thread: decoding gets what the model leaves over."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
