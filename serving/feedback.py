"""`/v1/feedback`: a signal about an answer, acknowledged once a crash cannot lose it.

The answer it is about need not be visible anywhere yet: they are joined when they are read.
"""

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from onlinerl.errors import RequestRefused, SpoolFull
from onlinerl.rollout_store.schema import FEEDBACK_TOPIC, Consent, FeedbackEvent, FeedbackSource
from onlinerl.serving.auth import Caller, UserHasher
from onlinerl.serving.chat import refusal
from onlinerl.serving.events import EventSink, Record
from onlinerl.serving.ids import uuid7
from onlinerl.serving.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_Id = Annotated[str, StringConstraints(pattern=r"^[\w.:-]{1,64}$")]
_Target = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_Tag = Annotated[str, StringConstraints(max_length=512)]


class _FeedbackBody(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    feedback_id: _Id | None = None
    interaction_id: _Target | None = None
    session_id: _Target | None = None
    choice_index: int | None = Field(default=None, ge=0)
    metric: str = Field(min_length=1, max_length=128)
    value: float | None = Field(default=None)
    source: FeedbackSource = "user"
    comment: str | None = Field(default=None, max_length=65_536)
    demonstration: str | None = Field(default=None, max_length=1_048_576)
    retracts: _Id | None = None
    user: str | None = Field(default=None, max_length=512)
    given_at: AwareDatetime | None = None
    tags: dict[str, _Tag] = Field(default={}, max_length=64)


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

    async def take(self, body: object, *, caller: Caller, consent: Consent) -> str:
        """Log a feedback and return its id, as the caller knows it.

        Without consent to be logged it is only counted.

        Raises:
            RequestRefused: 400 for a bad body, 409 when the id has another body, 503 when it
                could not be stored in time.
        """
        digest = _digest(body)
        feedback = _parse(body)
        feedback_id = feedback.feedback_id or self._new_id()
        if consent == "none":
            self._metrics.withheld.inc()
            return feedback_id
        logged_id = _logged_id(feedback_id, caller=caller)
        seen = self._seen.get(logged_id)
        if seen is None:
            event = self._event(feedback, logged_id=logged_id, caller=caller, consent=consent)
            seen = _Seen(digest, self._hand_over(event))
            self._seen[logged_id] = seen
            self._forget_old()
        elif seen.digest != digest:
            raise RequestRefused(
                f"feedback {feedback_id!r} was given with another body",
                409,
                "feedback_id",
                "feedback_conflict",
            )
        await self._until_stored(seen, logged_id=logged_id)
        return feedback_id

    def _event(
        self, feedback: _FeedbackBody, *, logged_id: str, caller: Caller, consent: Consent
    ) -> FeedbackEvent:
        given = feedback.model_dump(exclude={"feedback_id", "retracts", "user", "given_at"})
        retracts = feedback.retracts
        try:
            return FeedbackEvent(
                **given,
                feedback_id=logged_id,
                retracts=None if retracts is None else _logged_id(retracts, caller=caller),
                tenant=caller.tenant,
                consent=consent,
                user=self._users.hash(feedback.user, tenant=caller.tenant),
                given_at=feedback.given_at or datetime.now(UTC),
            )
        except ValidationError as error:
            raise refusal(error) from error

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


def _parse(body: object) -> _FeedbackBody:
    try:
        return _FeedbackBody.model_validate(body)
    except ValidationError as error:
        raise refusal(error) from error


def _logged_id(feedback_id: str, *, caller: Caller) -> str:
    """Ids of tenants never meet: neither a clash nor a retraction crosses the border."""
    return f"{caller.tenant}/{feedback_id}"


def _digest(body: Any) -> bytes:  # noqa: ANN401 any JSON
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def _resolve(stored: "asyncio.Future[None]") -> None:
    if not stored.done():
        stored.set_result(None)
