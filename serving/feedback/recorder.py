"""Feedback becomes events; each is acknowledged once a crash of the process cannot lose it.

The interaction that a feedback is about need not be logged yet: the two are joined when they are
read.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from onlinerl.errors import RequestRefused, SpoolFull
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, Consent, FeedbackEvent
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.serving.encoding.json import sorted_json
from onlinerl.serving.feedback.body import FeedbackBody, read_feedback, read_list
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.interaction.events import EventSink, Record
from onlinerl.serving.interaction.ids import uuid7
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.wire.parameters import refusal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Feedback:
    """A checked feedback and its event."""

    feedback_id: str
    """The caller's own id."""
    digest: bytes
    """SHA-256 of the body."""
    event: FeedbackEvent


@dataclass(frozen=True)
class _Recent:
    digest: bytes
    """SHA-256 of the body."""
    stored: "asyncio.Future[None]"


class FeedbackRecorder:
    """Records feedback of all tenants; remembers recent ids to tell a retry from a conflict.

    An id is RECEIVED when its record is handed to the sink and STORED when the spool has it on
    disk. A retry in between waits for the same record. Of ids that are no longer remembered ingest
    keeps the first record.

    Args:
        sink: Where events go.
        users: Hashes the ids of users.
        metrics: Counts feedback that is withheld or lost.
        max_recent: Number of ids to remember.
        store_timeout_s: Seconds to wait until the sink has stored a record.
        new_id: Makes the id of a feedback that has none.
    """

    def __init__(
        self,
        *,
        sink: EventSink,
        users: UserHasher,
        metrics: GatewayMetrics,
        max_recent: int,
        store_timeout_s: float,
        new_id: Callable[[], str] = uuid7,
    ) -> None:
        self._sink = sink
        self._users = users
        self._metrics = metrics
        self._max_recent = max_recent
        self._store_timeout_s = store_timeout_s
        self._new_id = new_id
        self._recent: OrderedDict[str, _Recent] = OrderedDict()

    async def record(self, body: object, *, caller: Caller, consent: Consent) -> dict[str, Any]:
        """Log one feedback or a list of them; returns the body of the answer.

        With consent `none` they are only counted. A list with one wrong entry is refused as a
        whole.

        Raises:
            RequestRefused: 400, the body is wrong; 409, an id was used with another body; 503, a
                feedback was not stored in time.
        """
        if not isinstance(body, list):
            (feedback_id,) = await self._record_all(
                [read_feedback(body)], [body], caller=caller, consent=consent
            )
            return _answer(feedback_id)
        ids = await self._record_all(read_list(body), body, caller=caller, consent=consent)
        return {"object": "list", "data": [_answer(feedback_id) for feedback_id in ids]}

    async def _record_all(
        self,
        feedbacks: Sequence[FeedbackBody],
        bodies: Sequence[object],
        *,
        caller: Caller,
        consent: Consent,
    ) -> list[str]:
        checked = [
            self._feedback(feedback, body, caller=caller, consent=consent)
            for feedback, body in zip(feedbacks, bodies, strict=True)
        ]
        ids = [each.feedback_id for each in checked]
        if consent == "none":
            self._metrics.withheld.inc(len(checked))
            return ids
        self._refuse_conflicts(checked)
        for each in checked:
            if each.event.feedback_id not in self._recent:
                self._recent[each.event.feedback_id] = _Recent(
                    each.digest, self._hand_over(each.event)
                )
        # Looked up before any is forgotten: a list may hold more ids than are remembered.
        entries = {each.event.feedback_id: self._recent[each.event.feedback_id] for each in checked}
        self._forget_old()
        for logged_id, entry in entries.items():
            await self._until_stored(entry, logged_id=logged_id)
        return ids

    def _feedback(
        self, feedback: FeedbackBody, body: object, *, caller: Caller, consent: Consent
    ) -> _Feedback:
        feedback_id = feedback.feedback_id or self._new_id()
        fields = feedback.model_dump(exclude={"feedback_id", "retracts", "user", "given_at"})
        retracts = feedback.retracts
        try:
            event = FeedbackEvent(
                **fields,
                feedback_id=_logged_id(feedback_id, caller=caller),
                retracts=None if retracts is None else _logged_id(retracts, caller=caller),
                tenant=caller.tenant,
                consent=consent,
                user=self._users.hash(feedback.user, tenant=caller.tenant),
                given_at=feedback.given_at or datetime.now(UTC),
            )
        except ValidationError as error:
            raise refusal(error) from error
        return _Feedback(feedback_id=feedback_id, digest=_digest(body), event=event)

    def _refuse_conflicts(self, feedbacks: Sequence[_Feedback]) -> None:
        """Refuse an id that stands for two bodies, among recent ones or within the list."""
        digests: dict[str, bytes] = {}
        for each in feedbacks:
            logged_id = each.event.feedback_id
            recent = self._recent.get(logged_id)
            digest = digests.setdefault(logged_id, each.digest) if recent is None else recent.digest
            if digest != each.digest:
                raise RequestRefused(
                    f"feedback {each.feedback_id!r} has another body already: use a new id",
                    409,
                    "feedback_id",
                    "feedback_conflict",
                )

    def _hand_over(self, event: FeedbackEvent) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[None] = loop.create_future()

        def on_stored() -> None:
            loop.call_soon_threadsafe(_resolve, stored)

        record = Record(
            topic=FEEDBACK_TOPIC,
            key=event.session_id or event.interaction_id or "",
            value=event.model_dump_json().encode(),
        )
        try:
            self._sink.put(record, on_stored=on_stored)
        except SpoolFull as error:
            self._metrics.lost.labels("spool_full").inc()
            logger.error("feedback was refused", extra={"error": str(error)})
            raise RequestRefused(str(error), 503, None, "spool_full") from error
        return stored

    async def _until_stored(self, entry: _Recent, *, logged_id: str) -> None:
        try:
            async with asyncio.timeout(self._store_timeout_s):
                await asyncio.shield(entry.stored)
        except TimeoutError as error:
            # It may still be stored; of two records with one id ingest keeps the first.
            self._recent.pop(logged_id, None)
            raise RequestRefused(
                "the feedback was not stored in time: send it again", 503
            ) from error

    def _forget_old(self) -> None:
        while len(self._recent) > self._max_recent:
            self._recent.popitem(last=False)


def _answer(feedback_id: str) -> dict[str, Any]:
    return {"object": "feedback", "feedback_id": feedback_id}


def _logged_id(feedback_id: str, *, caller: Caller) -> str:
    """The id with its tenant, so that no tenant meets or retracts the feedback of another."""
    return f"{caller.tenant}/{feedback_id}"


def _digest(body: Any) -> bytes:  # noqa: ANN401 any JSON
    return hashlib.sha256(sorted_json(body).encode()).digest()


def _resolve(stored: "asyncio.Future[None]") -> None:
    if not stored.done():
        stored.set_result(None)
