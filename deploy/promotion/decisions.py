"""Recording a decision so that a repeat after a crash changes nothing.

Order within each: table row (its id is made of what was decided, so a repeat counts once), tags,
arms, alias, verdict, answer. The alias is the point of no return; what follows it is made up for by
`finish_promotion`.
"""

import logging
import uuid
from collections.abc import Callable
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


class Decisions:
    """Writes to registry and tables.

    Args:
        registry: Tags, aliases and metrics.
        journal: Tables `promotions` and `audit`.
        policy: Name of the policy.
        now: The clock.
    """

    def __init__(
        self, registry: Registry, journal: Journal, *, policy: str, now: Callable[[], datetime]
    ) -> None:
        self._registry = registry
        self._journal = journal
        self._policy = policy
        self._now = now

    def promoted(
        self,
        version: int,
        *,
        champion: int | None,
        manifest: Manifest,
        report: SwapReport,
        request: OperatorRequest | None,
    ) -> None:
        """Every replica serves it: it becomes the champion."""
        action: Action = "bootstrap" if champion is None else "promote"
        reason = "the base model" if champion is None else "passed its gates"
        self._write_row(
            action, version, champion, reason=reason, request=request, report=report,
            manifest=manifest,
        )  # fmt: skip
        self._registry.log_metrics(version, _measured(report, manifest))
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
        """Make up for what a controller that died after the alias moved left undone.

        An open request would promote the champion again after a rollback.
        """
        version = self._registry.version(champion)
        if version is None:
            return
        if version.verdict != "promoted":
            self._registry.set_tags(champion, {VERDICT: "promoted"})
        request = open_request(version.tags.get(PROMOTE_REQUEST), version.tags.get(PROMOTE_RESULT))
        if request is not None and request.id == version.tags.get(PROMOTED_BY):
            self.answer_promote(champion, request, "promoted", "it serves")

    def refused(
        self, version: int, *, champion: int, reason: str, request: OperatorRequest | None
    ) -> None:
        """It never serves."""
        self._write_row("refuse", version, champion, reason=reason, request=request)
        self._set_verdict(version, "refused")
        self.answer_promote(version, request, "refused", reason)

    def failed(
        self, version: int, *, champion: int, reason: str, request: OperatorRequest | None
    ) -> None:
        """It passed, but could not be put into the replicas."""
        self._write_row("fail", version, champion, reason=reason, request=request)
        self._set_verdict(version, "failed")
        self.answer_promote(version, request, "failed", reason)

    def rolled_back(
        self, version: int, *, champion: int, report: SwapReport, request: OperatorRequest
    ) -> None:
        """An earlier version is the champion again."""
        if version != champion:
            reason = request.reason or "asked for"
            self._write_row(
                "rollback", version, champion, reason=reason, request=request, report=report
            )
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
        """Tell the person who asked, if somebody did."""
        if request is not None:
            self._audit(request, action=f"promote: {verdict}", subject=f"{version}", detail=reason)
            answer = OperatorReply(id=request.id, verdict=verdict, reason=_short(reason))
            self._registry.set_tags(version, {PROMOTE_RESULT: answer.model_dump_json()})

    def answer_rollback(
        self, request: OperatorRequest, verdict: Literal["rolled back", "failed"], reason: str
    ) -> None:
        """Tell the person who asked."""
        subject = "the version before" if request.version is None else f"{request.version}"
        self._audit(request, action=f"rollback: {verdict}", subject=subject, detail=reason)
        answer = OperatorReply(id=request.id, verdict=verdict, reason=_short(reason))
        self._registry.set_model_tag(ROLLBACK_RESULT, answer.model_dump_json())

    def _make_champion(self, version: int) -> None:
        found = self._registry.version(version)
        if found is not None and found.tags.get(ROLLED_BACK):
            self._registry.set_tags(version, {ROLLED_BACK: ""})
        # Every replica serves it by now: whatever a canary or shadow pinned is gone.
        self._journal.arms(
            champion_only(self._policy, version, reason="champion", decided_at=self._now())
        )
        self._registry.set_alias(CHAMPION, version)

    def _set_verdict(self, version: int, verdict: str) -> None:
        """A version that served keeps that: it can still be rolled back to.

        Nobody has to look at it any more, so it is not among those that wait for a person.
        """
        found = self._registry.version(version)
        if found is None or found.verdict == "promoted":
            return
        tags = {VERDICT: verdict}
        if found.tags.get(REVIEW) == "pending":
            tags[REVIEW] = NOT_NEEDED
        self._registry.set_tags(version, tags)

    def _write_row(
        self,
        action: Action,
        version: int,
        champion: int | None,
        *,
        reason: str,
        request: OperatorRequest | None,
        report: SwapReport | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        now = self._now()
        key = f"{self._policy}/{version} {action} over {champion} {request and request.id}"
        self._journal.promotion(
            PromotionRow(
                promotion_id=str(uuid.uuid5(_NAMESPACE, key)),
                policy=self._policy,
                version=version,
                from_version=champion,
                action=action,
                reason=reason,
                actor="controller" if request is None else request.actor,
                pause_ms=None if report is None else report.pause_ms,
                stage_ms=None if report is None else report.stage_ms,
                delta_bytes=None if manifest is None else manifest.num_bytes,
                full_bytes=None if manifest is None else manifest.full_bytes,
                changed_fraction=None if manifest is None else manifest.changed_fraction,
                max_abs_logprob_diff=None if report is None else report.max_abs_diff,
                mean_abs_logprob_diff=None if report is None else report.mean_abs_diff,
                decided_at=now,
                ingest_date=now.date(),
            )
        )
        metrics.DECISIONS.labels(action).inc()
        if report is not None:
            metrics.PAUSE_MS.observe(report.pause_ms)
        logger.info("decided", extra={"action": action, "version": version, "reason": reason})

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


def _short(reason: str) -> str:
    """Tags of a registry are bounded."""
    return reason[:500]


def _measured(report: SwapReport, manifest: Manifest) -> dict[str, float]:
    found = {
        "deploy.pause_ms": report.pause_ms,
        "deploy.stage_ms": report.stage_ms,
        "deploy.delta_bytes": float(manifest.num_bytes),
        "deploy.full_bytes": float(manifest.full_bytes),
        "deploy.changed_fraction": manifest.changed_fraction,
    }
    if report.mean_abs_diff is not None and report.max_abs_diff is not None:
        found["deploy.mean_abs_logprob_diff"] = report.mean_abs_diff
        found["deploy.max_abs_logprob_diff"] = report.max_abs_diff
    return found
