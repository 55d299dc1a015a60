"""In each pass the controller answers requests, examines candidates and seeds engines.

A pass never waits for a measurement, so rollbacks are answered and engines are seeded while a
candidate is being examined. An engine that cannot be seeded blocks neither. Every step can be
repeated: a controller that died anywhere continues from the state of the registry, the weights
folder and the engines.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from onlinerl.deploy import metrics
from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.gates.examiner import Examiner
from onlinerl.deploy.gates.verdicts import GateResult, missing_evidence, none_failed, report
from onlinerl.deploy.promotion.decisions import Decisions
from onlinerl.deploy.promotion.publisher import Publisher
from onlinerl.deploy.registry.protocol import (
    NOT_NEEDED,
    PROMOTE_REQUEST,
    PROMOTE_RESULT,
    PROMOTED_FROM,
    ROLLBACK_REQUEST,
    ROLLBACK_RESULT,
    ROLLED_BACK,
    Registry,
)
from onlinerl.deploy.registry.requests import OperatorRequest, open_request
from onlinerl.deploy.replicas.fleet import Expectation, Fleet, SwapReport
from onlinerl.errors import PromotionFailed, ServiceUnavailable, WeightsError
from onlinerl.registry.version import CANDIDATE, CHAMPION, PARENT, REVIEW, RegisteredVersion

logger = logging.getLogger(__name__)


class HeldLease(Protocol):
    """What the controller asks its lease; see `rollout_store.tables.lease.Lease`."""

    def check(self) -> None:
        """Raise LeaseHeld when the lease is lost by the clock of this process."""

    def confirm(self) -> None:
        """Raise LeaseHeld when the tables say that the lease is lost."""


def utc_now() -> datetime:
    """The current time, UTC."""
    return datetime.now(UTC)


class Controller:
    """Decides which version serves, and brings the engines there. Not thread-safe.

        candidate --superseded, or its parent was rolled back--> refused
            |------a gate failed, or rejected in review--------> refused
            +--> (review) --> published --> staged, committed, verified --> champion
                                  +------------max_attempts failures------> failed

    Args:
        registry: Source of truth for which version serves.
        fleet: The engines.
        examiner: Measures candidates.
        publisher: Writes versions for the engines to fetch.
        decisions: Records what was decided.
        config: Review mode and bounds.
        register_base: Registers the base model as version 1 and returns its number.
        lease: The right to decide. It is checked before the engines are changed, and confirmed
            before a decision is recorded.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        fleet: Fleet,
        examiner: Examiner,
        publisher: Publisher,
        decisions: Decisions,
        config: DeployConfig,
        register_base: Callable[[], int],
        lease: HeldLease,
    ) -> None:
        self._registry = registry
        self._fleet = fleet
        self._examiner = examiner
        self._publisher = publisher
        self._decisions = decisions
        self._config = config
        self._register_base = register_base
        self._lease = lease
        self._attempts: dict[int, int] = {}
        self._cleaned_up_for: tuple[int, int | None] | None = None
        self.status: str | None = "the registry has not been read yet"
        """Why the policy does not serve as it should; None when it does."""

    def tick(self) -> None:
        """Run one pass; call it again and again.

        Raises:
            ServiceUnavailable: when the registry, the tables or all engines do not answer. A later
                pass goes on where this one stopped.
            PromotionFailed: when the base model could not be measured or put into the engines.
            WeightsError: when the base model fails a gate, or its checkpoint is damaged.
            LeaseHeld: when another controller took over, or may soon.
        """
        self._lease.check()
        self._registry.check()
        champion = self._registry.alias(CHAMPION)
        if champion is None:
            champion = self._bootstrap()
        if champion is None:
            self.status = "version 1 is being prepared"
            return
        self._decisions.finish_promotion(champion)
        champion = self._roll_back(champion)
        self._seed(champion, only_idle=True)
        champion = self._decide_candidates(champion)
        self._set_status(self._seed(champion, only_idle=False))
        self._clean_up(champion)
        metrics.CHAMPION.set(champion)

    def _bootstrap(self) -> int | None:
        """Make the base model version 1 and champion; returns None while it is measured."""
        versions = self._registry.versions()
        version = versions[0].number if versions else self._register_base()
        results = self._examiner.examine(version, champion=None)
        if results is None:
            return None
        if not none_failed(results):
            failed = next(result for result in results if result.status == "failed")
            raise WeightsError(f"the base model failed gate {failed.name}: {failed.detail}")
        manifest = self._publisher.publish(version, champion=None)
        self._lease.check()
        swap = self._fleet.swap(self._expectation(version), fallback=None)
        self._lease.confirm()
        self._decisions.record_promotion(
            version, champion=None, manifest=manifest, report=swap, request=None
        )
        return version

    def _seed(self, champion: int, *, only_idle: bool) -> list[str]:
        """Bring engines that were restarted, or missed a swap, to the champion.

        Engines are seeded one by one, so a failing one does not block the others. Returns the
        reasons for the failures.

        With `only_idle`, engines that serve another version are left alone: after a crash during
        a promotion they may serve the new version already, and should not go back and forth.
        """
        replicas = self._fleet.not_on(champion)
        if only_idle:
            replicas = [each for each in replicas if not self._fleet.has_version_id(each)]
        failures = []
        for replica in replicas:
            try:
                self._publisher.publish(champion, champion=None)
                self._lease.check()
                self._fleet.swap(self._expectation(champion), fallback=None, only=[replica])
            except (PromotionFailed, WeightsError, ServiceUnavailable) as error:
                failures.append(f"{replica.name} could not be seeded: {error}")
            else:
                metrics.SEEDS.inc()
                logger.info("seeded", extra={"version": champion, "replica": replica.name})
        return failures

    def _set_status(self, failures: list[str]) -> None:
        num_ready = len(self._fleet.reachable())
        metrics.REPLICAS.labels("ready").set(num_ready)
        metrics.REPLICAS.labels("other").set(len(self._fleet.replicas) - num_ready)
        status = "; ".join(failures) or (None if num_ready else "no engine answers")
        if status is not None and status != self.status:  # not again in every pass
            logger.warning("the policy does not serve as it should: %s", status)
        self.status = status

    def _clean_up(self, champion: int) -> None:
        """Delete local checkpoints except of the champion, the one before it and open versions."""
        aliases = (champion, self._registry.alias(CANDIDATE))
        if aliases == self._cleaned_up_for:
            return
        versions = {version.number: version for version in self._registry.versions()}
        before = versions[champion].tags.get(PROMOTED_FROM) if champion in versions else None
        needed = {champion, *(version.number for version in self._open_versions(champion))}
        if before is not None:
            needed.add(int(before))
        self._examiner.keep_only(needed & versions.keys())
        self._cleaned_up_for = aliases

    def _decide_candidates(self, champion: int) -> int:
        """Decide about every open version that can be decided now; returns the champion then."""
        for version in self._open_versions(champion):
            champion = self._decide(version, champion)
            if self._examiner.is_busy:  # one measurement at a time, in this order
                break
        return champion

    def _open_versions(self, champion: int) -> list[RegisteredVersion]:
        """Versions without a decision: requested ones, then approved ones, then by age."""
        candidate = self._registry.alias(CANDIDATE) or 0
        open_versions = [
            version
            for version in self._registry.versions()
            if _promote_request(version) is not None
            or (
                version.number != champion
                and version.number <= candidate
                and version.verdict is None
            )
        ]
        return sorted(
            open_versions,
            key=lambda version: (_promote_request(version) is None, not _is_approved(version)),
        )

    def _objection(self, version: RegisteredVersion) -> str | None:
        """Why a version is refused without a measurement; None when it is measured.

        A request overrules its age and its parent.
        """
        if version.tags.get(REVIEW) == "rejected":
            return "rejected in review"
        if _promote_request(version) is not None:
            return None
        number = version.tags.get(PARENT, "")
        parent = self._registry.version(int(number)) if number.isdecimal() else None
        if parent is not None and parent.tags.get(ROLLED_BACK):
            return f"its parent was rolled back: version {number}"
        candidate = self._registry.alias(CANDIDATE)
        if candidate is not None and version.number < candidate and not _is_approved(version):
            return f"superseded by version {candidate}"
        return None

    def _decide(self, version: RegisteredVersion, champion: int) -> int:
        """Refuse, examine or promote a version; returns the champion afterwards."""
        request = _promote_request(version)
        if version.number == champion:
            self._decisions.answer_promote(version.number, request, "promoted", "it serves already")
            return champion
        if reason := self._objection(version):
            self._decisions.record_refusal(
                version.number, champion=champion, reason=reason, request=request
            )
            return champion
        try:
            results = self._examiner.examine(version.number, champion=champion)
            if results is None:
                return champion
            review_reason = self._review_reason(version, results, request)
            self._describe(version, results, review_reason)
            if not none_failed(results):
                self._refuse(version, champion, results, request)
                return champion
            if review_reason is not None:
                return champion
            if request is None and not _is_approved(version):
                self._registry.set_tags(version.number, {REVIEW: NOT_NEEDED})
            return self._promote(version.number, champion, request)
        except (PromotionFailed, WeightsError) as error:
            self._count_failure(version.number, champion, error, request)
            return champion

    def _refuse(
        self,
        version: RegisteredVersion,
        champion: int,
        results: list[GateResult],
        request: OperatorRequest | None,
    ) -> None:
        failed = [f"{each.name}: {each.detail}" for each in results if each.status == "failed"]
        reason = f"failed a gate: {'; '.join(failed)}"
        self._decisions.record_refusal(
            version.number, champion=champion, reason=reason, request=request
        )

    def _describe(
        self, version: RegisteredVersion, results: list[GateResult], review_reason: str | None
    ) -> None:
        """Show the results on the version's page in the registry, unless it does already."""
        headline = "No gate failed." if none_failed(results) else "**Refused: a gate failed.**"
        if none_failed(results) and review_reason is not None:
            headline = (
                f"**Waits for a person** ({review_reason}): set the tag `{REVIEW}` to `approved`"
                f" or `rejected`, or run `onlinerl promote {version.number}`."
            )
        text = report(results, headline=headline)
        if version.description != text:
            self._registry.describe(version.number, text)
            tags = {f"gate.{result.name}": result.status for result in results}
            self._registry.set_tags(version.number, tags)
            if review_reason is not None:
                self._registry.set_tags(version.number, {REVIEW: "pending"})
            values = {f"gate.{each.name}": each.value for each in results if each.value is not None}
            self._registry.log_metrics(version.number, values)

    def _review_reason(
        self, version: RegisteredVersion, results: list[GateResult], request: OperatorRequest | None
    ) -> str | None:
        """Why a person has to approve a version; None when one did, or the gates are enough."""
        if request is not None or _is_approved(version):
            return None
        if self._config.review == "required":
            return "the configuration asks for a review of every version"
        return missing_evidence(results, self._config.gates)

    def _promote(self, version: int, champion: int, request: OperatorRequest | None) -> int:
        manifest = self._publisher.publish(version, champion=champion)
        self._lease.confirm()
        swap = self._fleet.swap(self._expectation(version), fallback=champion)
        self._lease.confirm()
        self._decisions.record_promotion(
            version, champion=champion, manifest=manifest, report=swap, request=request
        )
        self._attempts.pop(version, None)
        return version

    def _count_failure(
        self, version: int, champion: int, error: Exception, request: OperatorRequest | None
    ) -> None:
        self._attempts[version] = self._attempts.get(version, 0) + 1
        logger.warning(
            "promotion failed",
            extra={"version": version, "attempt": self._attempts[version]},
            exc_info=error,
        )
        if self._attempts[version] >= self._config.max_attempts:
            self._decisions.record_failure(
                version, champion=champion, reason=str(error), request=request
            )
            del self._attempts[version]

    def _roll_back(self, champion: int) -> int:
        """Answer an open rollback request; returns the champion afterwards."""
        tags = self._registry.model_tags()
        request = open_request(tags.get(ROLLBACK_REQUEST), tags.get(ROLLBACK_RESULT))
        if request is None:
            return champion
        try:
            target = self._rollback_target(request, champion)
            swap = SwapReport()
            if target != champion:
                self._publisher.publish(target, champion=None)
                self._lease.check()
                swap = self._fleet.swap(self._expectation(target), fallback=champion)
        except (PromotionFailed, WeightsError) as error:
            self._decisions.answer_rollback(request, "failed", str(error))
            return champion
        self._lease.confirm()
        self._decisions.record_rollback(target, champion=champion, report=swap, request=request)
        return target

    def _rollback_target(self, request: OperatorRequest, champion: int) -> int:
        """The version to go back to; it has served before, so it passed its gates then.

        Raises:
            PromotionFailed: when there is no such version, or it never served.
        """
        number = request.version
        if number is None:
            current = self._registry.version(champion)
            before = None if current is None else current.tags.get(PROMOTED_FROM)
            if before is None:
                raise PromotionFailed(f"there is no version before {champion}")
            number = int(before)
        version = self._registry.version(number)
        if version is None or version.verdict != "promoted":
            raise PromotionFailed(
                f"version {number} never served: use `onlinerl promote {number}` instead"
            )
        return number

    def _expectation(self, version: int) -> Expectation:
        digest = self._publisher.manifest(version).digest()
        return Expectation(version, digest, self._examiner.probes(version))


def _is_approved(version: RegisteredVersion) -> bool:
    return version.tags.get(REVIEW) == "approved"


def _promote_request(version: RegisteredVersion) -> OperatorRequest | None:
    """The open request to promote the version, if any."""
    return open_request(version.tags.get(PROMOTE_REQUEST), version.tags.get(PROMOTE_RESULT))
