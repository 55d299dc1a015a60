"""A serving engine as the controller sees it: its weights, and nothing about requests."""

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from onlinerl.errors import ServiceUnavailable, WeightsError

UNKNOWN = "unknown"
"""Stamp of an engine whose weights are not known; the gateway routes nothing to it."""


class WorkerStatus(BaseModel):
    """What one worker of an engine says of its weights."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: Literal["idle", "busy", "staged", "failed"]
    version: int | None = None
    """Version in the model; None for the checkpoint that it started with."""
    settled: bool = True
    """False between applying a version and moving the version id."""
    target: int | None = None
    """Version that was asked for last."""
    error: str | None = None
    digest: str | None = None
    """Over the host copy of what serves, once it was asked for."""
    stage_ms: float | None = None
    num_bytes: int | None = None
    apply_ms: float | None = None
    broken: str | None = None


class EngineControl(Protocol):
    """One engine. Every call has a timeout and raises ServiceUnavailable after it."""

    @property
    def name(self) -> str:
        """Its address, for messages."""
        ...

    def stamp(self) -> str:
        """The version id that answers carry now."""
        ...

    def set_stamp(self, stamp: str) -> None:
        """Change the version id alone; only to correct it."""
        ...

    def is_paused(self) -> bool:
        """Whether requests are frozen."""
        ...

    def pause(self) -> None:
        """Freeze requests and drop keys and values of the old weights."""
        ...

    def resume(self) -> None:
        """Let requests go on."""
        ...

    def stage(self, root: Path, version: int) -> None:
        """Start to make a version ready."""
        ...

    def status(self) -> Sequence[WorkerStatus]:
        """Of every worker."""
        ...

    def apply(self, version: int, stamp: str) -> None:
        """Put the staged version in and move the version id. Needs a pause."""
        ...

    def revert(self) -> None:
        """Leave an update that was begun and not finished. Needs a pause."""
        ...

    def checksum(self) -> None:
        """Start to hash what serves."""
        ...

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Of every token after the first, at temperature 1, given those before it."""
        ...


_STATUSES = TypeAdapter(list[WorkerStatus])


class HttpEngineControl:
    """A vLLM engine with our weight transfer in it.

    Args:
        url: Its address.
        policy: Model name that it serves.
        request_timeout_s: Bound on a short call.
        commit_timeout_s: Bound on a call that waits for the model.
        secret: What a guard in front of the engine asks for.
    """

    def __init__(
        self,
        url: str,
        *,
        policy: str,
        request_timeout_s: float,
        commit_timeout_s: float,
        secret: str | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._policy = policy
        self._request_timeout_s = request_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._headers = {"Content-Type": "application/json"}
        if secret is not None:
            self._headers["Authorization"] = f"Bearer {secret}"

    @property
    def name(self) -> str:
        """Its address."""
        return self._url

    def stamp(self) -> str:
        """From `/weight_info`."""
        return str(_member(self._call("GET", "/weight_info"), "weight_version"))

    def set_stamp(self, stamp: str) -> None:
        """Through `/update_weight_version`."""
        self._call("POST", "/update_weight_version", {"new_version": stamp})

    def is_paused(self) -> bool:
        """From `/is_paused`."""
        return bool(_member(self._call("GET", "/is_paused"), "is_paused"))

    def pause(self) -> None:
        """Mode `keep`: requests stay, and compute their keys and values again when they go on."""
        self._call("POST", "/pause?mode=keep&clear_cache=true", timeout_s=self._commit_timeout_s)

    def resume(self) -> None:
        """Through `/resume`."""
        self._call("POST", "/resume", timeout_s=self._commit_timeout_s)

    def stage(self, root: Path, version: int) -> None:
        """Through a worker method; see `serving.weight_transfer`."""
        self._workers("stage_weights", json.dumps({"root": str(root), "version": version}))

    def status(self) -> Sequence[WorkerStatus]:
        """Of every worker."""
        answer = self._workers("weights_status")
        try:
            return _STATUSES.validate_python(answer)
        except ValidationError as error:
            raise WeightsError(f"{self._url} told no status of its weights: {error}") from error

    def apply(self, version: int, stamp: str) -> None:
        """Three calls of vLLM's weight update; the last one moves the id."""
        timeout_s = self._commit_timeout_s
        self._call("POST", "/start_weight_update", timeout_s=timeout_s)
        update = {"update_info": {"version": version}}
        self._call("POST", "/update_weights", update, timeout_s=timeout_s)
        finish = {"weight_version": stamp}
        self._call("POST", "/finish_weight_update", finish, timeout_s=timeout_s)

    def revert(self) -> None:
        """Through a worker method."""
        self._workers("revert_weights", timeout_s=self._commit_timeout_s)

    def checksum(self) -> None:
        """Through a worker method."""
        self._workers("checksum_weights")

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Teacher-forced: the tokens are a prompt, and vLLM scores prompts on request."""
        body = {
            "model": self._policy,
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        answer = self._call(
            "POST", "/inference/v1/generate", body, timeout_s=self._commit_timeout_s
        )
        positions = _member(answer, "prompt_logprobs")
        assert isinstance(positions, list)
        scored = zip(token_ids[1:], positions[1:], strict=True)
        return [float(position[str(token_id)]["logprob"]) for token_id, position in scored]

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


class MemoryEngineControl:
    """The twin: keeps versions as numbers, and fails where a test says so.

    Args:
        name: Its address.
        fault: Called with `<call>` before each call that changes something; may raise.
    """

    def __init__(self, name: str = "memory:0") -> None:
        self._name = name
        self._stamp = "default"
        self._status = WorkerStatus(state="idle")
        self._paused = False
        self._updating = False
        self.faults: dict[str, BaseException] = {}
        """Raised by the call of that name, until a test takes it out."""
        self.digests: dict[int | None, str] = {}
        """What `checksum` finds per version."""
        self.scores: dict[int | None, list[float]] = {}
        """What `logprobs` gives per version."""
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def _enter(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)
        if call in self.faults:
            raise self.faults[call]

    @property
    def name(self) -> str:
        """As given."""
        return self._name

    def stamp(self) -> str:
        """As last set."""
        self._enter("stamp")
        return self._stamp

    def set_stamp(self, stamp: str) -> None:
        """At once."""
        self._enter("set_stamp")
        self._stamp = stamp

    def is_paused(self) -> bool:
        """After `pause`."""
        return self._paused

    def pause(self) -> None:
        """At once."""
        self._enter("pause")
        self._paused = True

    def resume(self) -> None:
        """At once."""
        self._enter("resume")
        self._paused = False

    def stage(self, root: Path, version: int) -> None:
        """At once; a fault named `staging` is found by `status`, as in a real worker."""
        self._enter("stage")
        error = self.faults.get("staging")
        state: Literal["failed", "staged"] = "failed" if error else "staged"
        self._status = self._status.model_copy(
            update={"state": state, "target": version, "error": error and str(error)}
        )

    def status(self) -> Sequence[WorkerStatus]:
        """Of the only worker."""
        self._enter("status")
        return [self._status]

    def apply(self, version: int, stamp: str) -> None:
        """Three steps as in vLLM, so that a test can fail between them."""
        assert self._paused
        self._enter("apply")
        if self._updating:
            raise WeightsError("an update is open already")
        self._updating = True
        self._enter("update")
        if self._status.state != "staged" or self._status.target != version:
            raise WeightsError(f"version {version} is not staged")
        before = self._status.version
        self._status = self._status.model_copy(
            update={"state": "idle", "version": version, "settled": False, "digest": None}
        )
        self._before = before
        self._enter("finish")
        self._updating = False
        self._status = self._status.model_copy(update={"settled": True})
        self._stamp = stamp

    def revert(self) -> None:
        """Back to the version before an unfinished `apply`."""
        assert self._paused
        self._enter("revert")
        self._updating = False
        if not self._status.settled:
            self._status = self._status.model_copy(
                update={"version": self._before, "settled": True}
            )

    def checksum(self) -> None:
        """At once."""
        self._enter("checksum")
        digest = self.digests.get(self._status.version)
        self._status = self._status.model_copy(update={"digest": digest})

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """As given by the test, zeros otherwise."""
        self._enter("logprobs")
        return self.scores.get(self._status.version, [0.0] * (len(token_ids) - 1))

    def restart(self) -> None:
        """As a process that was killed and started again: version and stamp are gone."""
        self._stamp, self._status, self._paused = "default", WorkerStatus(state="idle"), False
        self._updating = False
