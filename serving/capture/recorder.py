"""Counts an answer that has ended, and hands its event to the log."""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from onlinerl.errors import SpoolFull
from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC, InteractionEvent
from onlinerl.serving.capture.event import event_of
from onlinerl.serving.interaction.events import EventSink, Record
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.sampled import Sampled
from onlinerl.serving.observability.metrics import GatewayMetrics

logger = logging.getLogger(__name__)


class SampledChoice(Protocol):
    """The part of a choice that is recorded."""

    @property
    def sampled(self) -> Sampled:
        """What the engine sampled for it."""
        ...


class EndedAnswer(Protocol):
    """The part of an ended answer that is recorded. Times are of `time.monotonic`."""

    @property
    def choices(self) -> Sequence[SampledChoice]:
        """All choices of the answer."""
        ...

    @property
    def asked_at(self) -> float:
        """When the engine was asked."""
        ...

    @property
    def answered_at(self) -> float:
        """When the engine last sent something."""
        ...

    @property
    def first_token_at(self) -> float | None:
        """When the first token came; None when it is not known."""
        ...

    @property
    def last_token_at(self) -> float | None:
        """When the last token came; None when there was none."""
        ...


class Recorder:
    """Counts answers and hands their events to the sink, without waiting for it."""

    def __init__(self, sink: EventSink, metrics: GatewayMetrics) -> None:
        self._sink = sink
        self._metrics = metrics

    def count(self, exchange: Exchange, answer: EndedAnswer) -> None:
        """Count tokens, finish reasons and times of an answer."""
        sampled = [choice.sampled for choice in answer.choices]
        self._metrics.answers.count(
            policy_version=exchange.policy_version,
            num_prompt_tokens=len(exchange.prompt_ids),
            choices=[(one.finish_reason or "error", len(one.token_ids)) for one in sampled],
        )
        if answer.last_token_at is not None:
            waited_s = answer.answered_at - answer.asked_at
            first = answer.first_token_at
            self._metrics.answers.observe_times(
                policy_version=exchange.policy_version,
                ttft_s=None if first is None else first - exchange.started,
                latency_s=answer.last_token_at - exchange.started,
                num_tokens=max(len(one.token_ids) for one in sampled),
                overhead_s=time.monotonic() - exchange.started - waited_s,
            )

    def log(self, exchange: Exchange, answer: EndedAnswer) -> bool:
        """Log an answer if its consent allows it; True when the sink has taken it."""
        if exchange.consent == "none":
            self._metrics.withheld.inc()
            return False
        event = event_of(
            exchange,
            [choice.sampled.completion() for choice in answer.choices],
            first_token_at=answer.first_token_at,
            last_token_at=answer.last_token_at,
        )
        return self.store(event)

    def store(self, event: InteractionEvent) -> bool:
        """Hand an event to the sink; False when it is lost, which is counted."""
        if not event.trainable:
            self._metrics.answers.untrainable.inc()
        record = Record(
            topic=INTERACTIONS_TOPIC,
            key=event.session_id,
            value=event.model_dump_json().encode(),
        )
        try:
            self._sink.put(record)
        except SpoolFull as error:
            self._metrics.lost.labels("spool_full").inc()
            logger.error("an interaction was served and not logged", extra={"error": str(error)})
            return False
        return True
