"""The controller's side of one serving engine: its weights and version id, never its requests."""

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from typing_extensions import override

from onlinerl.errors import ServiceUnavailable, WeightsError

UNKNOWN = "unknown"
"""Stamp of an engine whose weights are not known; the gateway routes nothing to it."""


class WorkerStatus(BaseModel):
    """The weights of one worker of an engine, as the worker reports them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: Literal["idle", "busy", "staged", "failed"]
    version: int | None = None
    """Version in the model; None for the checkpoint that the engine started with."""
    settled: bool = True
    """False from applying a version until the version id moved."""
    target: int | None = None
    """Version that was staged last, or is being staged."""
    error: str | None = None
    """Why staging failed."""
    digest: str | None = None
    """Checksum of the host copy of the weights; None until `checksum` computed it."""
    stage_ms: float | None = None
    """Time that staging took, milliseconds."""
    num_bytes: int | None = None
    """Bytes of payload that staging read."""
    apply_ms: float | None = None
    """Time that applying took, milliseconds."""
    broken: str | None = None
    """Why the worker's weights are in no known state; only a restart repairs it."""


class EngineControl(Protocol):
    """One engine. Every call is bounded in time.

    Raises:
        ServiceUnavailable: by every call, when the engine does not answer in time.
        WeightsError: by every call, when the engine refuses it.
    """

    @property
    def name(self) -> str:
        """The engine's address, for messages."""
        ...

    def stamp(self) -> str:
        """The version id that answers carry now, e.g. `assistant/12`."""
        ...

    def set_stamp(self, stamp: str) -> None:
        """Change the version id without the weights; only to correct it."""
        ...

    def is_paused(self) -> bool:
        """Whether requests are frozen."""
        ...

    def pause(self) -> None:
        """Freeze requests and drop the keys and values that the old weights computed."""
        ...

    def resume(self) -> None:
        """Let requests go on."""
        ...

    def stage(self, root: Path, version: int) -> None:
        """Start to fetch, verify and decode a version while serving goes on; poll `status`."""
        ...

    def status(self) -> Sequence[WorkerStatus]:
        """The status of every worker."""
        ...

    def apply(self, version: int, stamp: str) -> None:
        """Load the staged version into the model, then move the version id; call `pause` before."""
        ...

    def revert(self) -> None:
        """Take back an update that was begun and not finished; call `pause` before."""
        ...

    def checksum(self) -> None:
        """Start to hash the weights that serve; `status` gives the digest."""
        ...

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of every token after the first, at temperature 1, nats."""
        ...


_STATUSES = TypeAdapter(list[WorkerStatus])


class HttpEngineControl(EngineControl):
    """A vLLM engine that runs our weight transfer, over HTTP.

    Args:
        url: Address of the engine.
        policy: Name under which it serves the model.
        request_timeout_s: Bound on a short call, seconds.
        commit_timeout_s: Bound on a call that waits for the model, seconds.
        probe_timeout_s: Bound on a call that scores one sequence, seconds.
        secret: Bearer token for the guard in front of the engine; None without a guard.
    """

    def __init__(
        self,
        url: str,
        *,
        policy: str,
        request_timeout_s: float,
        commit_timeout_s: float,
        probe_timeout_s: float,
        secret: str | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._policy = policy
        self._request_timeout_s = request_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._probe_timeout_s = probe_timeout_s
        self._headers = {"Content-Type": "application/json"}
        if secret is not None:
            self._headers["Authorization"] = f"Bearer {secret}"

    @property
    @override
    def name(self) -> str:
        return self._url

    @override
    def stamp(self) -> str:
        return str(_member(self._call("GET", "/weight_info"), "weight_version"))

    @override
    def set_stamp(self, stamp: str) -> None:
        self._call("POST", "/update_weight_version", {"new_version": stamp})

    @override
    def is_paused(self) -> bool:
        return bool(_member(self._call("GET", "/is_paused"), "is_paused"))

    @override
    def pause(self) -> None:
        # `keep` leaves requests in the engine; they compute their keys and values again.
        self._call("POST", "/pause?mode=keep&clear_cache=true", timeout_s=self._commit_timeout_s)

    @override
    def resume(self) -> None:
        self._call("POST", "/resume", timeout_s=self._commit_timeout_s)

    @override
    def stage(self, root: Path, version: int) -> None:
        self._workers("stage_weights", json.dumps({"root": str(root), "version": version}))

    @override
    def status(self) -> Sequence[WorkerStatus]:
        answer = self._workers("weights_status")
        try:
            return _STATUSES.validate_python(answer)
        except ValidationError as error:
            raise WeightsError(
                f"{self._url} reported a status of its weights that cannot be read: {error}"
            ) from error

    @override
    def apply(self, version: int, stamp: str) -> None:
        # The last of the three calls moves the version id.
        timeout_s = self._commit_timeout_s
        self._call("POST", "/start_weight_update", timeout_s=timeout_s)
        update = {"update_info": {"version": version}}
        self._call("POST", "/update_weights", update, timeout_s=timeout_s)
        finish = {"weight_version": stamp}
        self._call("POST", "/finish_weight_update", finish, timeout_s=timeout_s)

    @override
    def revert(self) -> None:
        self._workers("revert_weights", timeout_s=self._commit_timeout_s)

    @override
    def checksum(self) -> None:
        self._workers("checksum_weights")

    @override
    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        # vLLM scores the tokens of a prompt on request.
        body = {
            "model": self._policy,
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        answer = self._call("POST", "/inference/v1/generate", body, timeout_s=self._probe_timeout_s)
        positions = _member(answer, "prompt_logprobs")
        if not isinstance(positions, list):
            raise WeightsError(f"{self._url} answered without a list of logprobs: {positions!r}")
        try:
            scored = zip(token_ids[1:], positions[1:], strict=True)
            return [float(position[str(token_id)]["logprob"]) for token_id, position in scored]
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{self._url} did not answer with a logprob of every token: {error!r}"
            ) from error

    def _workers(self, method: str, *args: str, timeout_s: float | None = None) -> object:
        body = {"method": method, "args": list(args)}
        return _member(self._call("POST", "/collective_rpc", body, timeout_s=timeout_s), "results")

    def _call(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = None
    ) -> object:
        # A fresh connection each time: an idle one may be closed by the engine at any moment, and
        # none of these calls may be repeated blindly.
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=self._headers,
            method=method,
        )
        timeout = self._request_timeout_s if timeout_s is None else timeout_s
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                raw = response.read()
        except urllib.error.HTTPError as error:
            detail = error.read(500).decode(errors="replace")
            raise WeightsError(f"{self._url}{path} answered {error.code}: {detail}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServiceUnavailable(f"{self._url}{path} did not answer: {error}") from error
        try:
            return json.loads(raw) if raw else None
        except ValueError as error:
            raise ServiceUnavailable(
                f"{self._url}{path} is no engine: it answered {raw[:100]!r}"
            ) from error


def _member(answer: object, key: str) -> object:
    if not isinstance(answer, dict) or key not in answer:
        raise WeightsError(f"the engine answered without {key!r}: {str(answer)[:200]}")
    return answer[key]


class MemoryEngineControl(EngineControl):
    """The twin for unit tests: keeps versions as numbers, and fails where a test tells it to.

    Args:
        name: Address of the engine.
    """

    def __init__(self, name: str = "memory:0") -> None:
        self._name = name
        self._stamp = "default"
        self._status = WorkerStatus(state="idle")
        self._paused = False
        self._updating = False
        self._before: int | None = None
        self.faults: dict[str, BaseException] = {}
        """Errors by the name of the call that raises them, until a test removes them."""
        self.digests: dict[int | None, str] = {}
        """Digest that `checksum` computes, by version."""
        self.scores: dict[int | None, list[float]] = {}
        """Result of `logprobs`, by version; zeros for any other version."""
        self.calls: list[str] = []
        """Names of the calls so far, in order."""
        self._lock = threading.Lock()

    def _enter(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)
        if call in self.faults:
            raise self.faults[call]

    @property
    @override
    def name(self) -> str:
        return self._name

    @override
    def stamp(self) -> str:
        self._enter("stamp")
        return self._stamp

    @override
    def set_stamp(self, stamp: str) -> None:
        self._enter("set_stamp")
        self._stamp = stamp

    @override
    def is_paused(self) -> bool:
        return self._paused

    @override
    def pause(self) -> None:
        self._enter("pause")
        self._paused = True

    @override
    def resume(self) -> None:
        self._enter("resume")
        self._paused = False

    @override
    def stage(self, root: Path, version: int) -> None:
        # A fault named `staging` shows in `status`, as one of a real worker does.
        self._enter("stage")
        error = self.faults.get("staging")
        state: Literal["failed", "staged"] = "failed" if error else "staged"
        self._status = self._status.model_copy(
            update={"state": state, "target": version, "error": error and str(error)}
        )

    @override
    def status(self) -> Sequence[WorkerStatus]:
        self._enter("status")
        return [self._status]

    @override
    def apply(self, version: int, stamp: str) -> None:
        # Three steps as in vLLM, so that a test can fail between them.
        assert self._paused
        self._enter("apply")
        if self._updating:
            raise WeightsError("an update is open already")
        self._updating = True
        self._enter("update")
        if self._status.state != "staged" or self._status.target != version:
            raise WeightsError(f"version {version} is not staged")
        self._before = self._status.version
        self._status = self._status.model_copy(
            update={"state": "idle", "version": version, "settled": False, "digest": None}
        )
        self._enter("finish")
        self._updating = False
        self._status = self._status.model_copy(update={"settled": True})
        self._stamp = stamp

    @override
    def revert(self) -> None:
        assert self._paused
        self._enter("revert")
        self._updating = False
        if not self._status.settled:
            self._status = self._status.model_copy(
                update={"version": self._before, "settled": True}
            )

    @override
    def checksum(self) -> None:
        self._enter("checksum")
        digest = self.digests.get(self._status.version)
        self._status = self._status.model_copy(update={"digest": digest})

    @override
    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self._enter("logprobs")
        return self.scores.get(self._status.version, [0.0] * (len(token_ids) - 1))

    def restart(self) -> None:
        """Lose version and stamp, as a process does that was killed and started again."""
        self._stamp, self._status, self._paused = "default", WorkerStatus(state="idle"), False
        self._updating = False
