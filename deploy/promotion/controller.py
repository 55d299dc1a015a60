"""One look at the registry: who asks for what, what the gates say, what has to serve.

A look never waits for a measurement, so replicas are seeded and rollbacks answered while a
candidate is being examined; and a replica that cannot be seeded holds up neither. Every step can
be done again: a controller that died anywhere goes on from what the registry, the weights folder
and the replicas say.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from onlinerl.deploy import metrics
from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.gates.examiner import Examiner
from onlinerl.deploy.gates.verdicts import GateResult, all_passed, missing_evidence, report
from onlinerl.deploy.promotion.decisions import Decisions
from onlinerl.deploy.promotion.publisher import Publisher
from onlinerl.deploy.registry.protocol import (
    CANDIDATE,
    CHAMPION,
    NOT_NEEDED,
    PARENT,
    PROMOTE_REQUEST,
    PROMOTE_RESULT,
    PROMOTED_FROM,
    REVIEW,
    ROLLBACK_REQUEST,
    ROLLBACK_RESULT,
    ROLLED_BACK,
    PolicyVersion,
    Registry,
)
from onlinerl.deploy.registry.requests import Request, open_request
from onlinerl.deploy.replicas.fleet import Expectation, Fleet, SwapReport
from onlinerl.errors import PromotionFailed, ServiceUnavailable, WeightsError

logger = logging.getLogger(__name__)


class HeldLease(Protocol):
    """What the controller asks its lease; see `rollout_store.tables.lease.Lease`."""

    def check(self) -> None:
        """Raise LeaseHeld when the lease is lost by the clock of this process."""

    def confirm(self) -> None:
        """Raise LeaseHeld when the tables say that the lease is lost."""


def utc_now() -> datetime:
    """The clock of production."""
    return datetime.now(UTC)


class Controller:
    """Gates, promotes, seeds and rolls back, one step at a time.

        candidate --gates--> refused; so are superseded ones and those of a rolled-back parent
            |--gates passed--> (review) --> published --> staged, committed, verified --> champion
                                            +--max_attempts--> failed

    Args:
        registry: The only source of truth for which version serves.
        fleet: The engines.
        examiner: Measures candidates.
        publisher: Writes versions.
        decisions: Records what was decided.
        config: Review mode and bounds.
        register_base: Registers the base model as version 1.
        lease: The right to do all this. It is checked before the engines are changed, and confirmed
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
        self._tidied: tuple[int, int | None] | None = None
        self.status: str | None = "no look at the registry yet"
        """Why the policy does not serve as it should; None when it does."""

    def tick(self) -> None:
        """One look.

        Raises:
            ServiceUnavailable: when registry, tables or all engines are away; nothing is lost.
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
        champion = self._consider_candidates(champion)
        self._set_status(self._seed(champion, only_idle=False))
        self._tidy(champion)
        metrics.CHAMPION.set(champion)

    def _bootstrap(self) -> int | None:
        """Make the base model version 1 and the champion; None while it is measured."""
        versions = self._registry.versions()
        version = versions[0].number if versions else self._register_base()
        results = self._examiner.examine(version, champion=None)
        if results is None:
            return None
        if not all_passed(results):
            raise WeightsError(f"the base model cannot serve: {results[0].detail}")
        manifest = self._publisher.publish(version, champion=None)
        self._lease.check()
        swapped = self._fleet.swap(self._expectation(version), fallback=None)
        self._lease.confirm()
        self._decisions.promoted(
            version, champion=None, manifest=manifest, report=swapped, request=None
        )
        return version

    def _seed(self, champion: int, *, only_idle: bool) -> list[str]:
        """Bring replicas that were restarted, or missed a swap, to the champion.

        Each on its own, so that one that fails holds up nothing else; returned is why they did.

        `only_idle`: only those that serve no version at all, so that a promotion that a crash
        interrupted goes forward instead of back and forth.
        """
        waiting = self._fleet.not_on(champion)
        if only_idle:
            prefix = self._fleet.stamp_of(0)[:-1]
            waiting = [each for each in waiting if not each.stamp().startswith(prefix)]
        failures = []
        for replica in waiting:
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
        if status is not None and status != self.status:  # said once, not at every look
            logger.warning("the policy does not serve as it should: %s", status)
        self.status = status

    def _tidy(self, champion: int) -> None:
        """Keep the local checkpoints of the champion, the one before it, and what is open."""
        served_and_offered = (champion, self._registry.alias(CANDIDATE))
        if served_and_offered == self._tidied:
            return
        versions = {version.number: version for version in self._registry.versions()}
        before = versions[champion].tags.get(PROMOTED_FROM) if champion in versions else None
        kept = {champion, *(version.number for version in self._wanted(champion))}
        if before is not None:
            kept.add(int(before))
        self._examiner.keep_only(kept & versions.keys())
        self._tidied = served_and_offered

    def _consider_candidates(self, champion: int) -> int:
        """The champion afterwards."""
        for version in self._wanted(champion):
            champion = self._consider(version, champion)
            if self._examiner.is_busy:  # one measurement at a time, in this order
                break
        return champion

    def _wanted(self, champion: int) -> list[PolicyVersion]:
        """What a person asked for, what a person approved, then undecided candidates by age."""
        candidate = self._registry.alias(CANDIDATE) or 0
        wanted = [
            version
            for version in self._registry.versions()
            if _request(version) is not None
            or (
                version.number != champion
                and version.number <= candidate
                and version.verdict is None
            )
        ]
        return sorted(
            wanted, key=lambda version: (_request(version) is None, not _approved(version))
        )

    def _objection(self, version: PolicyVersion) -> str | None:
        """Why it is refused before anything is measured; who asks for a version overrules age."""
        if version.tags.get(REVIEW) == "rejected":
            return "rejected in review"
        if _request(version) is not None:
            return None
        parent = version.tags.get(PARENT, "")
        found = self._registry.version(int(parent)) if parent.isdecimal() else None
        if found is not None and found.tags.get(ROLLED_BACK):
            return f"its parent was rolled back: version {parent}"
        candidate = self._registry.alias(CANDIDATE)
        if candidate is not None and version.number < candidate and not _approved(version):
            return f"superseded by version {candidate}"
        return None

    def _consider(self, version: PolicyVersion, champion: int) -> int:
        request = _request(version)
        if version.number == champion:
            self._decisions.answer_promote(version.number, request, "promoted", "serves already")
            return champion
        if reason := self._objection(version):
            self._decisions.refused(
                version.number, champion=champion, reason=reason, request=request
            )
            return champion
        try:
            results = self._examiner.examine(version.number, champion=champion)
            if results is None:
                return champion
            waits_for = self._waits_for(version, results, request)
            self._show(version, results, waits_for)
            if not all_passed(results):
                self._refuse(version, champion, results, request)
                return champion
            if waits_for is not None:
                return champion
            if request is None and not _approved(version):
                self._registry.set_tags(version.number, {REVIEW: NOT_NEEDED})
            return self._promote(version.number, champion, request)
        except (PromotionFailed, WeightsError) as error:
            self._failed(version.number, champion, error, request)
            return champion

    def _refuse(
        self,
        version: PolicyVersion,
        champion: int,
        results: list[GateResult],
        request: Request | None,
    ) -> None:
        failed = [f"{each.name}: {each.detail}" for each in results if each.status == "failed"]
        reason = f"failed the gates ({'; '.join(failed)})"
        self._decisions.refused(version.number, champion=champion, reason=reason, request=request)

    def _show(
        self, version: PolicyVersion, results: list[GateResult], waits_for: str | None
    ) -> None:
        headline = "All gates let it pass." if all_passed(results) else "**Refused by its gates.**"
        if all_passed(results) and waits_for is not None:
            headline = (
                f"**Waits for a person** ({waits_for}): set the tag `{REVIEW}` to `approved` or"
                f" `rejected`, or run `onlinerl promote {version.number}`."
            )
        text = report(results, headline=headline)
        if version.description != text:
            self._registry.describe(version.number, text)
            tags = {f"gate.{result.name}": result.status for result in results}
            self._registry.set_tags(version.number, tags)
            if waits_for is not None:
                self._registry.set_tags(version.number, {REVIEW: "pending"})
            measured = {
                f"gate.{each.name}": each.value for each in results if each.value is not None
            }
            self._registry.log_metrics(version.number, measured)

    def _waits_for(
        self, version: PolicyVersion, results: list[GateResult], request: Request | None
    ) -> str | None:
        """Why only a person may let it pass; None when one did, or the gates are enough."""
        if request is not None or _approved(version):
            return None
        if self._config.review == "required":
            return "every version is reviewed"
        return missing_evidence(results, self._config.gates)

    def _promote(self, version: int, champion: int, request: Request | None) -> int:
        manifest = self._publisher.publish(version, champion=champion)
        self._lease.confirm()
        swapped = self._fleet.swap(self._expectation(version), fallback=champion)
        self._lease.confirm()
        self._decisions.promoted(
            version, champion=champion, manifest=manifest, report=swapped, request=request
        )
        self._attempts.pop(version, None)
        return version

    def _failed(
        self, version: int, champion: int, error: Exception, request: Request | None
    ) -> None:
        self._attempts[version] = self._attempts.get(version, 0) + 1
        logger.warning(
            "promotion failed",
            extra={"version": version, "attempt": self._attempts[version]},
            exc_info=error,
        )
        if self._attempts[version] >= self._config.max_attempts:
            self._decisions.failed(version, champion=champion, reason=str(error), request=request)
            del self._attempts[version]

    def _roll_back(self, champion: int) -> int:
        """Answer an open request; the champion afterwards."""
        tags = self._registry.model_tags()
        request = open_request(tags.get(ROLLBACK_REQUEST), tags.get(ROLLBACK_RESULT))
        if request is None:
            return champion
        try:
            target = self._rollback_target(request, champion)
            report_ = SwapReport()
            if target != champion:
                self._publisher.publish(target, champion=None)
                self._lease.check()
                report_ = self._fleet.swap(self._expectation(target), fallback=champion)
        except (PromotionFailed, WeightsError) as error:
            self._decisions.answer_rollback(request, "failed", str(error))
            return champion
        self._lease.confirm()
        self._decisions.rolled_back(target, champion=champion, report=report_, request=request)
        return target

    def _rollback_target(self, request: Request, champion: int) -> int:
        """Only a version that served before: it passed its gates then.

        Raises:
            PromotionFailed: when there is none, or it never served.
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
            raise PromotionFailed(f"version {number} never served; promote it instead")
        return number

    def _expectation(self, version: int) -> Expectation:
        digest = self._publisher.manifest(version).digest()
        return Expectation(version, digest, self._examiner.probes(version))


def _approved(version: PolicyVersion) -> bool:
    return version.tags.get(REVIEW) == "approved"


def _request(version: PolicyVersion) -> Request | None:
    return open_request(version.tags.get(PROMOTE_REQUEST), version.tags.get(PROMOTE_RESULT))
