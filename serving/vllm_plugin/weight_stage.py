"""The host copy of the weights that serve, and the version that is staged beside it.

It runs inside an engine worker but knows neither vLLM nor torch. A background thread fetches,
verifies and decodes while the model serves, so that a commit only has to copy.
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
"""Priority of the background thread: it gets the CPU time that serving leaves."""


class StageRequest(BaseModel):
    """The version that a worker is asked to stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Path
    """Folder of the policy's published versions, on this worker's machine."""
    version: int


@dataclass(frozen=True)
class StagedVersion:
    """A verified version, ready to be loaded."""

    version: int
    weights: Weights
    changed: frozenset[str]
    """Names of tensors that differ from the weights below; all when the names themselves differ."""
    base_version: int | None
    """Version of the weights that it was staged over."""
    num_bytes: int
    """Bytes of payload that were read."""
    stage_ms: float
    """Milliseconds that staging took."""


class WeightStage:
    """The weights of one worker.

        IDLE --stage()--> STAGING --thread--> STAGED --apply()--> APPLIED --settle()--> IDLE
                              |                                      |
                              +--error--> FAILED --stage()--> ...    +--revert()--> IDLE (as before)

    `stage`, `apply`, `revert` and `settle` are called by the worker's one RPC thread; the
    background thread only writes its result, under the lock. There is at most one background
    thread: a second request while one runs is refused.

    A version whose staging met an unexpected error is refused until the engine is restarted, so
    that a controller does not repeat for ever what cannot succeed. Other versions can be staged.
    """

    def __init__(self, weights: Weights, *, version: int | None = None) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._weights = dict(weights)
        self._version = version
        self._staged: StagedVersion | None = None
        self._undo: tuple[int | None, dict[str, HostTensor]] | None = None
        self._target: int | None = None
        self._error: str | None = None
        self._faults: dict[int, str] = {}
        """Unexpected errors of staging, by version."""
        self._digest: str | None = None
        self._apply_ms: float | None = None

    def stage(self, request: StageRequest) -> None:
        """Start to stage a version; `status` shows the result.

        Raises:
            WeightsError: while another request runs, while an applied version is not settled, or
                for a version whose staging met an unexpected error before.
        """
        if self._undo is not None:
            raise WeightsError(f"version {self._version} is applied and not settled yet")
        if request.version in self._faults:
            raise WeightsError(
                f"staging version {request.version} met {self._faults[request.version]}: look into "
                "the engine's log, and restart the engine to try again"
            )

        def job() -> None:
            staged = self._resolve(request)
            with self._lock:
                self._staged = staged

        # What was staged before is dropped first, so that a commit can mean one version only.
        self._start(
            job, before=lambda: self._forget(target=request.version), target=request.version
        )

    def start_checksum(self) -> None:
        """Start to hash the host copy of what serves; `status` shows the digest.

        Raises:
            WeightsError: while another request runs.
        """

        def job() -> None:
            value = digest({name: tensor.sha256() for name, tensor in self._weights.items()})
            with self._lock:
                self._digest = value

        self._digest = None
        self._start(job, before=lambda: None)

    def apply(self, version: int, load: Callable[[StagedVersion], None]) -> None:
        """Let `load` put the staged version into the model; if it raises, nothing changes here.

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
        """Undo the last `apply`, after the caller has put `undo()` back into the model."""
        assert self._undo is not None
        with self._lock:
            (self._version, self._weights), self._undo = self._undo, None
            self._digest = None

    def settle(self) -> None:
        """Make the applied version final and free the weights before it."""
        self._undo = None

    @property
    def weights(self) -> Weights:
        """The host copy of what is in the model."""
        return self._weights

    @property
    def version(self) -> int | None:
        """Version of what is in the model; None for the checkpoint that the engine started with."""
        return self._version

    def status(self) -> dict[str, object]:
        """The state as plain values, for a remote caller."""
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

    def _start(
        self, job: Callable[[], None], *, before: Callable[[], None], target: int | None = None
    ) -> None:
        """Run `job` in the background; `before` runs under the lock, unless another job runs."""
        if self._thread is not None and self._thread.is_alive():
            raise WeightsError("another version is being staged or hashed")
        with self._lock:
            before()
            self._error = None
        self._thread = threading.Thread(
            target=self._run, args=(job, target), name="weights", daemon=True
        )
        self._thread.start()

    def _run(self, job: Callable[[], None], target: int | None) -> None:
        _yield_cores_to_serving()
        try:
            job()
        except (WeightsError, OSError) as error:
            logger.warning("weights were not made ready", exc_info=True)
            self._note_error(f"{type(error).__name__}: {error}", target=None)
        except Exception as error:
            logger.exception("making weights ready failed unexpectedly")
            self._note_error(f"an unexpected {type(error).__name__}: {error}", target=target)

    def _note_error(self, error: str, *, target: int | None) -> None:
        with self._lock:
            self._error = error
            if target is not None:
                self._faults[target] = error

    def _resolve(self, request: StageRequest) -> StagedVersion:
        started = time.monotonic()
        root, base, current = request.root, self._weights, self._version
        steps = plan(root, target=request.version, current=current)
        weights = resolve(root, target=request.version, current=current, base=base)
        # When the names themselves differ, the weights can only be loaded as a whole.
        changed = _changed(base, weights) if base.keys() == weights.keys() else frozenset(weights)
        return StagedVersion(
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
    """Lower the priority of this thread; on Linux niceness belongs to the thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
