"""Putting a version into every replica: stage on all, commit on all, verify.

A replica that cannot stage stops everything with nothing changed. A replica that cannot commit
goes on with its old weights under its old id. A replica whose weights are not what they should be
goes back, and one whose weights nobody knows, or that could not go back, is stamped `unknown`,
which no request is routed to; only a new commit and its proof give it a version id again.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.replicas.engine_control import UNKNOWN, Replica, WorkerStatus
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
    """Of every token after the first, at temperature 1."""


@dataclass(frozen=True)
class Expectation:
    """What a replica has to show after a swap."""

    version: int
    digest: str
    """Over the checksums of all tensors."""
    probes: Sequence[Probe]


@dataclass(frozen=True)
class SwapReport:
    """How a swap went; over several replicas the worst of each."""

    pause_ms: float = 0.0
    stage_ms: float = 0.0
    num_bytes: int = 0
    mean_abs_diff: float | None = None
    max_abs_diff: float | None = None


class Fleet:
    """All replicas of a policy.

    Args:
        replicas: The engines; they may come and go.
        policy: Its name, the first half of every version id.
        root: Folder of the published versions.
        config: Timeouts and bounds.
        sleep: Waits between two looks at a replica.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
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
        """The id that answers of a version carry."""
        return str(PolicyVersion(self._policy, version))

    def reachable(self) -> list[Replica]:
        """Replicas that answer, brought into a known state."""
        found = []
        for replica in self.replicas:
            try:
                self._recover(replica)
            except ServiceUnavailable:
                continue
            except WeightsError:
                logger.exception("replica is in no known state", extra={"replica": replica.name})
                continue
            found.append(replica)
        return found

    def not_on(self, version: int) -> list[Replica]:
        """Reachable replicas that serve something else, e.g. because they were restarted."""
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
        only: Sequence[Replica] | None = None,
    ) -> SwapReport:
        """Bring reachable replicas to a version and prove it; one that is there is only proven.

        Args:
            expectation: The version and what it has to show.
            fallback: Version to return to when the proof fails.
            only: Replicas that are meant; all when None.

        Raises:
            PromotionFailed: when no replica serves the version; all serve what they did before.
            ServiceUnavailable: when no replica answers.
        """
        reachable = [each for each in self.reachable() if only is None or each in only]
        if not reachable:
            raise ServiceUnavailable("no engine answers")
        pending = [replica for replica in self.not_on(expectation.version) if replica in reachable]
        report = self._stage(pending, expectation.version)
        pause_ms, failed = self._commit(pending, expectation.version)
        serving = [replica for replica in reachable if replica not in failed]
        if not serving:
            raise PromotionFailed(
                f"version {expectation.version} could not be committed: {_reasons(failed)}"
            )
        try:
            mean, worst = self._verify(serving, expectation)
            self._bring_in(serving, expectation.version)
        except (WeightsError, ServiceUnavailable) as error:
            self._return(serving, fallback)
            raise PromotionFailed(f"version {expectation.version}: {error}") from error
        return SwapReport(pause_ms, report.stage_ms, report.num_bytes, mean, worst)

    def _stage(self, replicas: Sequence[Replica], version: int) -> SwapReport:
        try:
            for replica in replicas:
                replica.stage(self._root, version)
            statuses = [self._wait(replica, self._config.stage_timeout_s) for replica in replicas]
        except (WeightsError, ServiceUnavailable) as error:
            raise PromotionFailed(f"version {version} could not be staged: {error}") from error
        workers = [status for found in statuses for status in found]
        for status in workers:
            if status.state != "staged" or status.target != version:
                raise PromotionFailed(
                    f"version {version} could not be staged, nothing was changed: {status.error}"
                )
        return SwapReport(
            stage_ms=max((status.stage_ms or 0.0 for status in workers), default=0.0),
            num_bytes=max((status.num_bytes or 0 for status in workers), default=0),
        )

    def _wait(self, replica: Replica, timeout_s: float) -> Sequence[WorkerStatus]:
        deadline = time.monotonic() + timeout_s
        statuses = replica.status()
        while any(status.state == "busy" for status in statuses):
            if time.monotonic() > deadline:
                raise ServiceUnavailable(f"{replica.name} was not ready within {timeout_s:g} s")
            self._sleep(_POLL_S)
            statuses = replica.status()
        return statuses

    def _commit(
        self, replicas: Sequence[Replica], version: int
    ) -> tuple[float, dict[Replica, OnlineRLError]]:
        if not replicas:
            return 0.0, {}
        with ThreadPoolExecutor(max_workers=len(replicas)) as pool:
            results = list(pool.map(lambda replica: self._commit_one(replica, version), replicas))
        failed = {
            replica: result
            for replica, result in zip(replicas, results, strict=True)
            if isinstance(result, OnlineRLError)
        }
        pauses = [result for result in results if isinstance(result, float)]
        return max(pauses, default=0.0), failed

    def _commit_one(self, replica: Replica, version: int) -> float | OnlineRLError:
        """Milliseconds of pause, or why the replica kept what it had."""
        started = time.monotonic()
        try:
            # What was taken out stays out until its proof.
            stamp = UNKNOWN if replica.stamp() == UNKNOWN else self.stamp_of(version)
            replica.pause()
            replica.apply(version, stamp)
            replica.resume()
        except (WeightsError, ServiceUnavailable) as error:
            logger.warning("commit failed", extra={"replica": replica.name}, exc_info=True)
            if not self._recovered_on(replica, version):
                return error
        pause_ms = (time.monotonic() - started) * 1000
        if pause_ms > self._config.pause_warning_ms:
            logger.warning("long pause", extra={"replica": replica.name, "pause_ms": pause_ms})
        return pause_ms

    def _recovered_on(self, replica: Replica, version: int) -> bool:
        """Put the replica in a known state; whether that is the wanted version after all."""
        try:
            self._recover(replica)
            return all(
                status.version == version and status.settled and status.broken is None
                for status in replica.status()
            )
        except (WeightsError, ServiceUnavailable):
            return False

    def _recover(self, replica: Replica) -> None:
        """End what a dead controller or a failed call left half-way.

        An applied version that was not finished is taken back. The version id follows the weights,
        never the other way round. Requests go on only then.
        """
        paused = replica.is_paused()
        statuses = replica.status()
        if not paused and not all(status.settled for status in statuses):
            replica.pause()
            paused = True
        if paused:
            # Also when every worker is settled: vLLM refuses the next update while one is open
            # that was begun and brought nothing.
            statuses = self._reverted(replica)
        self._correct_stamp(replica, statuses)
        if paused:
            replica.resume()

    def _reverted(self, replica: Replica) -> Sequence[WorkerStatus]:
        try:
            replica.revert()
        except WeightsError:
            logger.exception("update could not be reverted", extra={"replica": replica.name})
        return replica.status()

    def _correct_stamp(self, replica: Replica, statuses: Sequence[WorkerStatus]) -> None:
        versions = {status.version for status in statuses}
        stamp = replica.stamp()
        known = len(versions) == 1 and all(
            status.settled and status.broken is None for status in statuses
        )
        version = versions.pop() if known else None
        if not known or stamp == UNKNOWN:
            # Also when the workers agree: a version that failed its proof looks settled as well.
            wanted = UNKNOWN
        elif version is None:
            # The checkpoint that the engine started with: no version until it was seeded.
            wanted = stamp if not stamp.startswith(f"{self._policy}/") else UNKNOWN
        else:
            wanted = self.stamp_of(version)
        if stamp != wanted:
            logger.warning(
                "version id corrected",
                extra={"replica": replica.name, "was": stamp, "is": wanted},
            )
            replica.set_stamp(wanted)

    def _verify(
        self, replicas: Sequence[Replica], expectation: Expectation
    ) -> tuple[float | None, float | None]:
        """The worst mean and the largest difference of logprobs, nats; None without probes.

        Each replica on its own: many right ones must not hide one that is wrong.
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
                    f" the weights, more than {bound:g}"
                )
            means.append(mean)
            largest.append(max(differences))
        return max(means, default=None), max(largest, default=None)

    def _verify_digest(self, replica: Replica, expectation: Expectation) -> None:
        replica.checksum()
        for status in self._wait(replica, self._config.stage_timeout_s):
            if status.version != expectation.version or status.digest != expectation.digest:
                raise WeightsError(
                    f"{replica.name} holds version {status.version} with checksum {status.digest},"
                    f" not {expectation.digest}"
                )

    def _probe(self, replica: Replica, expectation: Expectation) -> list[float]:
        differences = []
        for probe in expectation.probes:
            found = replica.logprobs(probe.token_ids)
            differences += [abs(a - b) for a, b in zip(found, probe.logprobs, strict=True)]
        return differences

    def _bring_in(self, replicas: Sequence[Replica], version: int) -> None:
        """The proof is passed: replicas that were taken out before serve again."""
        for replica in replicas:
            if replica.stamp() == UNKNOWN:
                replica.set_stamp(self.stamp_of(version))

    def _return(self, replicas: Sequence[Replica], fallback: int | None) -> None:
        """Best effort on the way out of a failed proof; what cannot return is taken out."""
        for replica in replicas:
            if fallback is None or not self._returned(replica, fallback):
                self._take_out(replica)

    def _returned(self, replica: Replica, fallback: int) -> bool:
        """Each on its own: one that is away does not take the others out."""
        try:
            self._stage([replica], fallback)
            _, failed = self._commit([replica], fallback)
        except (PromotionFailed, ServiceUnavailable):
            logger.exception("replica could not return", extra={"replica": replica.name})
            return False
        return not failed

    def _take_out(self, replica: Replica) -> None:
        try:
            replica.set_stamp(UNKNOWN)
        except (WeightsError, ServiceUnavailable):
            logger.exception("replica could not be taken out", extra={"replica": replica.name})


def _reasons(failed: dict[Replica, OnlineRLError]) -> str:
    return "; ".join(f"{replica.name}: {error}" for replica, error in failed.items())
