"""Recording a decision so that repeating it after a crash changes nothing.

A promotion is written in this order: table row, metrics, tags, arms, alias, verdict, reply. The id
of the row is derived from the decision, so a repeated row counts once. Moving the alias is the
point of no return: `finish_promotion` catches up on whatever should have followed it.
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from onlinerl.deploy import metrics
from onlinerl.deploy.promotion.arms import champion_only
from onlinerl.deploy.promotion.journal import Journal
from onlinerl.deploy.registry.protocol import (
    NOT_NEEDED,
    PROMOTE_REQUEST,
    PROMOTE_RESULT,
    PROMOTED_BY,
    PROMOTED_FROM,
    ROLLBACK_RESULT,
    ROLLED_BACK,
    Registry,
)
from onlinerl.deploy.registry.requests import OperatorReply, OperatorRequest, open_request
from onlinerl.deploy.replicas.fleet import SwapReport
from onlinerl.deploy.weights.delta import Manifest
from onlinerl.registry.version import CHAMPION, REVIEW, VERDICT
from onlinerl.rollout_store.schema import AuditRow, PromotionRow

logger = logging.getLogger(__name__)

Action = Literal["bootstrap", "promote", "rollback", "refuse", "fail"]
_NAMESPACE = uuid.UUID("5f0f3f0a-7d0b-4a53-9d3c-0a1f6f1c2b7e")


@dataclass(frozen=True)
class Decision:
    """What was decided about a version, why, and for whom."""

    action: Action
    version: int
    champion: int | None
    """The champion before the decision; None when the base model is the first."""
    reason: str
    request: OperatorRequest | None
    """The request that it answers; None when the controller decided by itself."""
    report: SwapReport | None = None
    """Measurements of the swap; None when no engine changed its weights."""
    manifest: Manifest | None = None
    """The version as published; None when nothing was published for the decision."""

    def row(self, *, policy: str, decided_at: datetime) -> PromotionRow:
        """The row of table `promotions`. A decision that is repeated has the same id."""
        request_id = None if self.request is None else self.request.id
        key = f"{policy}/{self.version} {self.action} over {self.champion} {request_id}"
        row = PromotionRow(
            promotion_id=str(uuid.uuid5(_NAMESPACE, key)),
            policy=policy,
            version=self.version,
            from_version=self.champion,
            action=self.action,
            reason=self.reason,
            actor="controller" if self.request is None else self.request.actor,
            decided_at=decided_at,
            ingest_date=decided_at.date(),
        )
        measurements: dict[str, float | None] = {}
        if self.report is not None:
            measurements |= {
                "pause_ms": self.report.pause_ms,
                "stage_ms": self.report.stage_ms,
                "max_abs_logprob_diff": self.report.max_abs_diff,
                "mean_abs_logprob_diff": self.report.mean_abs_diff,
            }
        if self.manifest is not None:
            measurements |= {
                "delta_bytes": self.manifest.num_bytes,
                "full_bytes": self.manifest.full_bytes,
                "changed_fraction": self.manifest.changed_fraction,
            }
        return row.model_copy(update=measurements)


class Decisions:
    """Writes what was decided to the registry and the tables.

    Args:
        registry: Takes tags, aliases and metrics.
        journal: Takes rows of the tables `promotions`, `audit` and `arms`.
        policy: Name of the policy.
        now: The clock, UTC.
    """

    def __init__(
        self, registry: Registry, journal: Journal, *, policy: str, now: Callable[[], datetime]
    ) -> None:
        self._registry = registry
        self._journal = journal
        self._policy = policy
        self._now = now

    def record_promotion(
        self,
        version: int,
        *,
        champion: int | None,
        manifest: Manifest,
        report: SwapReport,
        request: OperatorRequest | None,
    ) -> None:
        """Make a version that the engines serve the champion.

        Args:
            version: Number of the version.
            champion: The champion before it; None when it is the first.
            manifest: The version as published.
            report: Measurements of the swap.
            request: The request that asked for it, if any.
        """
        action: Action = "bootstrap" if champion is None else "promote"
        reason = "the base model" if champion is None else "passed its gates"
        self._record(Decision(action, version, champion, reason, request, report, manifest))
        self._registry.log_metrics(version, _swap_metrics(report, manifest))
        if champion is not None:
            tags = {
                PROMOTED_FROM: str(champion),
                PROMOTED_BY: "" if request is None else request.id,
            }
            self._registry.set_tags(version, tags)
        self._make_champion(version)
        self._registry.set_tags(version, {VERDICT: "promoted"})
        self.answer_promote(version, request, "promoted", reason)

    def finish_promotion(self, champion: int) -> None:
        """Write what a controller did not that died after it moved the alias.

        A request that stayed open would promote the champion again after a rollback.
        """
        version = self._registry.version(champion)
        if version is None:
            return
        if version.verdict != "promoted":
            self._registry.set_tags(champion, {VERDICT: "promoted"})
        request = open_request(version.tags.get(PROMOTE_REQUEST), version.tags.get(PROMOTE_RESULT))
        if request is not None and request.id == version.tags.get(PROMOTED_BY):
            self.answer_promote(champion, request, "promoted", "it serves")

    def record_refusal(
        self, version: int, *, champion: int, reason: str, request: OperatorRequest | None
    ) -> None:
        """Refuse a version, which then never serves unless somebody asks for it."""
        self._record(Decision("refuse", version, champion, reason, request))
        self._set_verdict(version, "refused")
        self.answer_promote(version, request, "refused", reason)

    def record_failure(
        self, version: int, *, champion: int, reason: str, request: OperatorRequest | None
    ) -> None:
        """Give up a version that could not be measured or put into the engines."""
        self._record(Decision("fail", version, champion, reason, request))
        self._set_verdict(version, "failed")
        self.answer_promote(version, request, "failed", reason)

    def record_rollback(
        self, version: int, *, champion: int, report: SwapReport, request: OperatorRequest
    ) -> None:
        """Make an earlier version, which the engines serve again, the champion."""
        if version != champion:
            reason = request.reason or "asked for"
            self._record(Decision("rollback", version, champion, reason, request, report))
            self._registry.set_tags(champion, {ROLLED_BACK: reason})
            self._make_champion(version)
        self.answer_rollback(request, "rolled back", f"version {version} serves")

    def answer_promote(
        self,
        version: int,
        request: OperatorRequest | None,
        verdict: Literal["promoted", "refused", "failed"],
        reason: str,
    ) -> None:
        """Reply to whoever asked to promote the version; nothing to do when nobody did."""
        if request is not None:
            self._audit(request, action=f"promote: {verdict}", subject=f"{version}", detail=reason)
            answer = OperatorReply(id=request.id, verdict=verdict, reason=_shorten(reason))
            self._registry.set_tags(version, {PROMOTE_RESULT: answer.model_dump_json()})

    def answer_rollback(
        self, request: OperatorRequest, verdict: Literal["rolled back", "failed"], reason: str
    ) -> None:
        """Reply to the person who asked to roll back."""
        subject = "the version before" if request.version is None else f"{request.version}"
        self._audit(request, action=f"rollback: {verdict}", subject=subject, detail=reason)
        answer = OperatorReply(id=request.id, verdict=verdict, reason=_shorten(reason))
        self._registry.set_model_tag(ROLLBACK_RESULT, answer.model_dump_json())

    def _make_champion(self, version: int) -> None:
        registered = self._registry.version(version)
        if registered is not None and registered.tags.get(ROLLED_BACK):
            self._registry.set_tags(version, {ROLLED_BACK: ""})
        # Every engine serves the version by now, so no canary or shadow is left.
        self._journal.arms(
            champion_only(self._policy, version, reason="champion", decided_at=self._now())
        )
        self._registry.set_alias(CHAMPION, version)

    def _set_verdict(self, version: int, verdict: str) -> None:
        """Set the verdict and end a pending review.

        A version that served keeps the verdict `promoted`, because it can still be rolled back to.
        """
        registered = self._registry.version(version)
        if registered is None or registered.verdict == "promoted":
            return
        tags = {VERDICT: verdict}
        if registered.tags.get(REVIEW) == "pending":
            tags[REVIEW] = NOT_NEEDED
        self._registry.set_tags(version, tags)

    def _record(self, decision: Decision) -> None:
        self._journal.promotion(decision.row(policy=self._policy, decided_at=self._now()))
        metrics.DECISIONS.labels(decision.action).inc()
        if decision.report is not None:
            metrics.PAUSE_MS.observe(decision.report.pause_ms)
        logger.info(
            "decided",
            extra={
                "action": decision.action,
                "version": decision.version,
                "reason": decision.reason,
            },
        )

    def _audit(self, request: OperatorRequest, *, action: str, subject: str, detail: str) -> None:
        now = self._now()
        self._journal.audit(
            AuditRow(
                audit_id=str(uuid.uuid5(_NAMESPACE, f"{request.id} {action}")),
                actor=request.actor,
                action=action,
                subject=f"{self._policy}/{subject}",
                detail=f"{request.reason}: {detail}" if request.reason else detail,
                acted_at=now,
                ingest_date=now.date(),
            )
        )


def _shorten(reason: str) -> str:
    """The reason within the length that the registry allows for a tag."""
    return reason[:500]


def _swap_metrics(report: SwapReport, manifest: Manifest) -> dict[str, float]:
    values = {
        "deploy.pause_ms": report.pause_ms,
        "deploy.stage_ms": report.stage_ms,
        "deploy.delta_bytes": float(manifest.num_bytes),
        "deploy.full_bytes": float(manifest.full_bytes),
        "deploy.changed_fraction": manifest.changed_fraction,
    }
    if report.mean_abs_diff is not None and report.max_abs_diff is not None:
        values["deploy.mean_abs_logprob_diff"] = report.mean_abs_diff
        values["deploy.max_abs_logprob_diff"] = report.max_abs_diff
    return values
