"""Putting a version into all engines of a policy: stage, commit, verify.

    stage on all  --one cannot-->    stop, nothing was changed
    commit on all --one cannot-->    it keeps its old weights and their version id
    verify all    --one is wrong-->  all return to the version before

An engine that could not return, or whose weights nobody knows, gets the stamp `unknown`. The
gateway routes nothing to such an engine; only a new commit that passes its verification gives it a
version id again.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.replicas.engine_control import UNKNOWN, EngineControl, WorkerStatus
from onlinerl.errors import OnlineRLError, PromotionFailed, ServiceUnavailable, WeightsError
from onlinerl.rollout_store.policy_version import PolicyVersion

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class Probe(BaseModel):
    """A token sequence and the logprobs that the right weights give it."""

    # Weights that are not finite give logprobs that are not, and the files have to hold them.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of every token after the first, at temperature 1, nats."""


@dataclass(frozen=True)
class Expectation:
    """The version that an engine should hold, and how to verify that it does."""

    version: int
    digest: str
    """Checksum over the checksums of all tensors."""
    probes: Sequence[Probe]


@dataclass(frozen=True)
class SwapReport:
    """Measurements of a swap; over several engines the worst of each."""

    pause_ms: float = 0.0
    """Longest time that an engine did not generate."""
    stage_ms: float = 0.0
    """Longest time that an engine took to fetch, verify and decode the version."""
    num_bytes: int = 0
    """Bytes of payload that one engine read."""
    mean_abs_diff: float | None = None
    """Mean difference between an engine's logprobs and those of the probes, nats."""
    max_abs_diff: float | None = None
    """Largest of these differences, nats."""


def stamp_for(statuses: Sequence[WorkerStatus], stamp: str, *, policy: str) -> str:
    """The version id that an engine must carry; the id follows the weights, never the reverse.

    Args:
        statuses: Status of every worker of the engine.
        stamp: The version id that the engine carries now.
        policy: Name of the policy that it serves.
    """
    versions = {status.version for status in statuses}
    is_known = len(versions) == 1 and all(
        status.settled and status.broken is None for status in statuses
    )
    # A version that failed its verification is settled too, so UNKNOWN stays UNKNOWN here.
    if not is_known or stamp == UNKNOWN:
        return UNKNOWN
    version = versions.pop()
    if version is not None:
        return str(PolicyVersion(policy, version))
    # The checkpoint that the engine started with has no version id until the engine is seeded.
    return UNKNOWN if _names_version(stamp, policy=policy) else stamp


def _names_version(stamp: str, *, policy: str) -> bool:
    return stamp.startswith(f"{policy}/")


class Fleet:
    """All engines of a policy.

    Args:
        replicas: The engines. Any of them may be away at any time.
        policy: Name of the policy, the first half of every version id.
        root: Folder of the published versions.
        config: Timeouts and bounds.
        sleep: Waits between two polls of an engine, seconds.
    """

    def __init__(
        self,
        replicas: Sequence[EngineControl],
        *,
        policy: str,
        root: Path,
        config: DeployConfig,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.replicas = replicas
        self._policy = policy
        self._root = root
        self._config = config
        self._sleep = sleep

    def stamp_of(self, version: int) -> str:
        """The version id that answers of a version carry, e.g. `assistant/12`."""
        return str(PolicyVersion(self._policy, version))

    def has_version_id(self, replica: EngineControl) -> bool:
        """Whether the engine's answers carry the id of a version of the policy."""
        return _names_version(replica.stamp(), policy=self._policy)

    def reachable(self) -> list[EngineControl]:
        """The engines that answer, each brought into a known state first."""
        reachable = []
        for replica in self.replicas:
            try:
                self._recover(replica)
            except ServiceUnavailable:
                continue
            except WeightsError:
                logger.exception("replica is in no known state", extra={"replica": replica.name})
                continue
            reachable.append(replica)
        return reachable

    def not_on(self, version: int) -> list[EngineControl]:
        """The reachable engines that serve another version, e.g. because they were restarted."""
        return [
            replica
            for replica in self.reachable()
            if replica.stamp() != self.stamp_of(version)
            or any(status.version != version for status in replica.status())
        ]

    def swap(
        self,
        expectation: Expectation,
        *,
        fallback: int | None,
        only: Sequence[EngineControl] | None = None,
    ) -> SwapReport:
        """Bring the reachable engines to a version and verify it.

        An engine that holds the version already is verified without a pause.

        Args:
            expectation: The version, and how to verify it.
            fallback: Version to return to when the verification fails; None withdraws the engines
                from the pool instead.
            only: The engines to bring there; all when None.

        Raises:
            PromotionFailed: when no engine serves the version. Each serves what it did before, or
                is withdrawn.
            ServiceUnavailable: when no engine answers.
        """
        reachable = [each for each in self.reachable() if only is None or each in only]
        if not reachable:
            raise ServiceUnavailable("no engine answers")
        pending = [replica for replica in self.not_on(expectation.version) if replica in reachable]
        report = self._stage(pending, expectation.version)
        pause_ms, errors = self._commit(pending, expectation.version)
        serving = [replica for replica in reachable if replica not in errors]
        if not serving:
            raise PromotionFailed(
                f"version {expectation.version} could not be committed: {_reasons(errors)}"
            )
        try:
            mean, worst = self._verify(serving, expectation)
            self._readmit(serving, expectation.version)
        except (WeightsError, ServiceUnavailable) as error:
            self._fall_back(serving, fallback)
            raise PromotionFailed(f"version {expectation.version}: {error}") from error
        return SwapReport(pause_ms, report.stage_ms, report.num_bytes, mean, worst)

    def _stage(self, replicas: Sequence[EngineControl], version: int) -> SwapReport:
        try:
            for replica in replicas:
                replica.stage(self._root, version)
            statuses = [self._wait(replica, self._config.stage_timeout_s) for replica in replicas]
        except (WeightsError, ServiceUnavailable) as error:
            raise PromotionFailed(f"version {version} could not be staged: {error}") from error
        workers = [status for of_replica in statuses for status in of_replica]
        for status in workers:
            if status.state != "staged" or status.target != version:
                raise PromotionFailed(
                    f"version {version} could not be staged, nothing was changed: {status.error}"
                )
        return SwapReport(
            stage_ms=max((status.stage_ms or 0.0 for status in workers), default=0.0),
            num_bytes=max((status.num_bytes or 0 for status in workers), default=0),
        )

    def _wait(self, replica: EngineControl, timeout_s: float) -> Sequence[WorkerStatus]:
        deadline = time.monotonic() + timeout_s
        statuses = replica.status()
        while any(status.state == "busy" for status in statuses):
            if time.monotonic() > deadline:
                raise ServiceUnavailable(f"{replica.name} was not ready within {timeout_s:g} s")
            self._sleep(_POLL_S)
            statuses = replica.status()
        return statuses

    def _commit(
        self, replicas: Sequence[EngineControl], version: int
    ) -> tuple[float, dict[EngineControl, OnlineRLError]]:
        """The longest pause in milliseconds, and the engines that could not, with the reason."""
        if not replicas:
            return 0.0, {}
        with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
            results = list(pool.map(lambda replica: self._commit_one(replica, version), replicas))
        errors = {
            replica: result
            for replica, result in zip(replicas, results, strict=True)
            if isinstance(result, OnlineRLError)
        }
        pauses = [result for result in results if isinstance(result, float)]
        return max(pauses, default=0.0), errors

    def _commit_one(self, replica: EngineControl, version: int) -> float | OnlineRLError:
        """Milliseconds of pause, or the error that left the engine on its old weights."""
        started = time.monotonic()
        try:
            # An engine that was withdrawn stays so until it is verified.
            stamp = UNKNOWN if replica.stamp() == UNKNOWN else self.stamp_of(version)
            replica.pause()
            replica.apply(version, stamp)
            replica.resume()
        except (WeightsError, ServiceUnavailable) as error:
            logger.warning("commit failed", extra={"replica": replica.name}, exc_info=True)
            if not self._recover_to(replica, version):
                return error
        pause_ms = (time.monotonic() - started) * 1000
        if pause_ms > self._config.pause_warning_ms:
            logger.warning("long pause", extra={"replica": replica.name, "pause_ms": pause_ms})
        return pause_ms

    def _recover_to(self, replica: EngineControl, version: int) -> bool:
        """Bring the engine into a known state; whether it holds `version` despite the error."""
        try:
            self._recover(replica)
            return all(
                status.version == version and status.settled and status.broken is None
                for status in replica.status()
            )
        except (WeightsError, ServiceUnavailable):
            return False

    def _recover(self, replica: EngineControl) -> None:
        """End what a dead controller or a failed call left half-way.

        A version that was applied and not finished is taken back, and the version id is corrected
        to the weights. Only then do paused requests go on.
        """
        is_paused = replica.is_paused()
        statuses = replica.status()
        if not is_paused and not all(status.settled for status in statuses):
            replica.pause()
            is_paused = True
        if is_paused:
            # Also when every worker is settled: an update that was begun and brought nothing is
            # still open, and vLLM then refuses the next one.
            statuses = self._revert(replica)
        self._correct_stamp(replica, statuses)
        if is_paused:
            replica.resume()

    def _revert(self, replica: EngineControl) -> Sequence[WorkerStatus]:
        try:
            replica.revert()
        except WeightsError:
            logger.exception("update could not be reverted", extra={"replica": replica.name})
        return replica.status()

    def _correct_stamp(self, replica: EngineControl, statuses: Sequence[WorkerStatus]) -> None:
        stamp = replica.stamp()
        correct = stamp_for(statuses, stamp, policy=self._policy)
        if stamp != correct:
            logger.warning(
                "version id corrected",
                extra={"replica": replica.name, "was": stamp, "is": correct},
            )
            replica.set_stamp(correct)

    def _verify(
        self, replicas: Sequence[EngineControl], expectation: Expectation
    ) -> tuple[float | None, float | None]:
        """The worst mean and the largest difference of logprobs, nats; None without probes.

        Each engine is judged by its own mean, so that many right ones do not hide a wrong one.
        """
        means: list[float] = []
        largest: list[float] = []
        bound = self._config.probe.max_mean_abs_diff
        for replica in replicas:
            self._verify_digest(replica, expectation)
            differences = self._probe(replica, expectation)
            if not differences:
                continue
            mean = sum(differences) / len(differences)
            if not mean <= bound:  # also when it is nan
                raise WeightsError(
                    f"the logprobs of {replica.name} differ by {mean:.4g} on average from those of"
                    f" the weights; deploy.probe.max_mean_abs_diff allows {bound:g}"
                )
            means.append(mean)
            largest.append(max(differences))
        return max(means, default=None), max(largest, default=None)

    def _verify_digest(self, replica: EngineControl, expectation: Expectation) -> None:
        replica.checksum()
        for status in self._wait(replica, self._config.stage_timeout_s):
            if status.version != expectation.version or status.digest != expectation.digest:
                raise WeightsError(
                    f"{replica.name} holds version {status.version} with checksum {status.digest},"
                    f" not version {expectation.version} with checksum {expectation.digest}"
                )

    def _probe(self, replica: EngineControl, expectation: Expectation) -> list[float]:
        differences = []
        for probe in expectation.probes:
            logprobs = replica.logprobs(probe.token_ids)
            differences += [abs(a - b) for a, b in zip(logprobs, probe.logprobs, strict=True)]
        return differences

    def _readmit(self, replicas: Sequence[EngineControl], version: int) -> None:
        """Give withdrawn engines that passed the verification their version id."""
        for replica in replicas:
            if replica.stamp() == UNKNOWN:
                replica.set_stamp(self.stamp_of(version))

    def _fall_back(self, replicas: Sequence[EngineControl], fallback: int | None) -> None:
        """After a failed verification: return each engine to `fallback`, or withdraw it.

        One at a time, so that an engine that is away does not withdraw the others.
        """
        for replica in replicas:
            if fallback is None or not self._return_to(fallback, replica):
                self._withdraw(replica)

    def _return_to(self, version: int, replica: EngineControl) -> bool:
        try:
            self._stage([replica], version)
            _, errors = self._commit([replica], version)
        except (PromotionFailed, ServiceUnavailable):
            logger.exception("replica could not return", extra={"replica": replica.name})
            return False
        return not errors

    def _withdraw(self, replica: EngineControl) -> None:
        try:
            replica.set_stamp(UNKNOWN)
        except (WeightsError, ServiceUnavailable):
            logger.exception("replica could not be withdrawn", extra={"replica": replica.name})


def _reasons(errors: dict[EngineControl, OnlineRLError]) -> str:
    return "; ".join(f"{replica.name}: {error}" for replica, error in errors.items())
