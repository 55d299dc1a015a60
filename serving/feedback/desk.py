"""`/v1/feedback`: a signal about an answer, acknowledged once a crash cannot lose it.

The answer it is about need not be visible anywhere yet: they are joined when they are read.
"""

import asyncio
import hashlib
import json
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
from onlinerl.serving.feedback.body import FeedbackBody, read_feedback, read_list
from onlinerl.serving.interaction.caller import Caller
from onlinerl.serving.interaction.events import EventSink, Record
from onlinerl.serving.interaction.ids import uuid7
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.wire.parameters import refusal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """A feedback that was read."""

    feedback_id: str
    """As the caller knows it."""
    digest: bytes
    event: FeedbackEvent


@dataclass(frozen=True)
class _Seen:
    digest: bytes
    stored: "asyncio.Future[None]"


class FeedbackDesk:
    """Takes feedback of all tenants; remembers recent ids to tell a retry from a clash.

    An id is RECEIVED when its record is handed over and STORED when the spool has it on disk. A
    retry that comes in between waits for the same record. What is older than the memory is told
    apart by ingest, which keeps the first.
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
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    async def take(self, body: object, *, caller: Caller, consent: Consent) -> dict[str, Any]:
        """Log a feedback, or every one of a list; what the caller is answered.

        Without consent to be logged they are only counted. A list of which one is wrong is refused
        whole.

        Raises:
            RequestRefused: 400 for a bad body, 409 when an id has another body, 503 when it could
                not be stored in time.
        """
        if not isinstance(body, list):
            (feedback_id,) = await self._take_all(
                [read_feedback(body)], [body], caller=caller, consent=consent
            )
            return _answer(feedback_id)
        ids = await self._take_all(read_list(body), body, caller=caller, consent=consent)
        return {"object": "list", "data": [_answer(feedback_id) for feedback_id in ids]}

    async def _take_all(
        self,
        feedbacks: Sequence[FeedbackBody],
        bodies: Sequence[object],
        *,
        caller: Caller,
        consent: Consent,
    ) -> list[str]:
        given = [
            self._given(feedback, body, caller=caller, consent=consent)
            for feedback, body in zip(feedbacks, bodies, strict=True)
        ]
        ids = [each.feedback_id for each in given]
        if consent == "none":
            self._metrics.withheld.inc(len(given))
            return ids
        self._refuse_conflicts(given)
        for each in given:
            if each.event.feedback_id not in self._seen:
                self._seen[each.event.feedback_id] = _Seen(each.digest, self._hand_over(each.event))
        # Looked up before anything is forgotten: a list may be longer than the memory.
        seen = {each.event.feedback_id: self._seen[each.event.feedback_id] for each in given}
        self._forget_old()
        for logged_id, entry in seen.items():
            await self._until_stored(entry, logged_id=logged_id)
        return ids

    def _given(
        self, feedback: FeedbackBody, body: object, *, caller: Caller, consent: Consent
    ) -> _Given:
        feedback_id = feedback.feedback_id or self._new_id()
        given = feedback.model_dump(exclude={"feedback_id", "retracts", "user", "given_at"})
        retracts = feedback.retracts
        try:
            event = FeedbackEvent(
                **given,
                feedback_id=_logged_id(feedback_id, caller=caller),
                retracts=None if retracts is None else _logged_id(retracts, caller=caller),
                tenant=caller.tenant,
                consent=consent,
                user=self._users.hash(feedback.user, tenant=caller.tenant),
                given_at=feedback.given_at or datetime.now(UTC),
            )
        except ValidationError as error:
            raise refusal(error) from error
        return _Given(feedback_id=feedback_id, digest=_digest(body), event=event)

    def _refuse_conflicts(self, given: Sequence[_Given]) -> None:
        """An id stands for one body, among those of before and within a list."""
        digests: dict[str, bytes] = {}
        for each in given:
            logged_id = each.event.feedback_id
            seen = self._seen.get(logged_id)
            known = seen.digest if seen is not None else digests.setdefault(logged_id, each.digest)
            if known != each.digest:
                raise RequestRefused(
                    f"feedback {each.feedback_id!r} was given with another body",
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

    async def _until_stored(self, seen: _Seen, *, logged_id: str) -> None:
        try:
            async with asyncio.timeout(self._store_timeout_s):
                await asyncio.shield(seen.stored)
        except TimeoutError as error:
            # It may still be stored: ingest keeps one of two equal ids.
            self._seen.pop(logged_id, None)
            raise RequestRefused("the feedback was not stored in time", 503) from error

    def _forget_old(self) -> None:
        while len(self._seen) > self._max_recent:
            self._seen.popitem(last=False)


def _answer(feedback_id: str) -> dict[str, Any]:
    return {"object": "feedback", "feedback_id": feedback_id}


def _logged_id(feedback_id: str, *, caller: Caller) -> str:
    """Ids of tenants never meet: neither a clash nor a retraction crosses the border."""
    return f"{caller.tenant}/{feedback_id}"


def _digest(body: Any) -> bytes:  # noqa: ANN401 any JSON
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def _resolve(stored: "asyncio.Future[None]") -> None:
    if not stored.done():
        stored.set_result(None)
