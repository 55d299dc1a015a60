"""What the gateway does with a chat request, whatever the protocol around it.

Admit, render, route, answer, log. HTTP is in `app`, the wire format in `chat` and `chat_answer`.
"""

import asyncio
import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from onlinerl.errors import RequestRefused, SpoolFull
from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC, Consent, Sampling
from onlinerl.serving.answer import Answer, Choice
from onlinerl.serving.auth import Caller, UserHasher, narrowed, narrowest
from onlinerl.serving.chat import ChatRequest
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.conversations import Conversations, Match, Scope, Turn
from onlinerl.serving.engine_client import Engine, Generate
from onlinerl.serving.events import EventSink, Record
from onlinerl.serving.exchange import Exchange, Lineage
from onlinerl.serving.ids import uuid7
from onlinerl.serving.metrics import GatewayMetrics
from onlinerl.serving.renderer import Renderer
from onlinerl.serving.replicas import Replica, ReplicaPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a caller says about a request beside its body."""

    session_id: str | None = None
    consent: str | None = None


class Gateway:
    """Answers chat requests and logs every token that was sampled for them.

    Lives in one event loop. Holds at most `limits.max_in_flight` answers; `close` waits for them.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        policy: str,
        engines: Sequence[Engine],
        renderer: Renderer,
        sink: EventSink,
        metrics: GatewayMetrics,
        users: UserHasher,
        new_id: Callable[[], str] = uuid7,
    ) -> None:
        self.config = config
        self.policy = policy
        self.metrics = metrics
        self.pool = ReplicaPool(engines, policy=policy, poll_s=config.timeouts.poll_s)
        self._renderer = renderer
        self._sink = sink
        self._users = users
        self._new_id = new_id
        self._conversations = Conversations(
            max_turns=config.limits.max_conversations,
            max_tokens=config.limits.max_conversation_tokens,
        )
        self._answers: set[Answer] = set()

    async def start(self) -> None:
        """Look at every engine once, then go on looking."""
        await asyncio.gather(*(self.pool.look(replica) for replica in self.pool.replicas))
        self.pool.start()

    async def close(self) -> None:
        """Wait for running answers up to `timeouts.shutdown_s`, then cut them off; log all."""
        running = list(self._answers)
        try:
            async with asyncio.timeout(self.config.timeouts.shutdown_s):
                await asyncio.gather(*(answer.ended() for answer in running))
        except TimeoutError:
            for answer in running:
                answer.cancel()
            await asyncio.gather(*(answer.ended() for answer in running))
        await self.pool.close()

    @property
    def num_in_flight(self) -> int:
        """Answers that run, those whose caller has left included."""
        return len(self._answers)

    def begin(self, chat: ChatRequest, *, caller: Caller, terms: Terms) -> tuple[Exchange, Answer]:
        """Admit a request and start to answer it.

        Raises:
            RequestRefused: over a limit, for another model, or when no engine serves.
        """
        if self.num_in_flight >= self.config.limits.max_in_flight:
            raise RequestRefused("too many requests at once", 429, None, "rate_limit_exceeded")
        if chat.model != self.policy:
            raise RequestRefused(
                f"there is no model {chat.model!r}: this gateway serves {self.policy!r}",
                404,
                "model",
                "model_not_found",
            )
        replica = self.pool.pick()
        exchange = self._admit(chat, caller=caller, terms=terms, version=replica.version or "")
        return exchange, self._start(exchange, replica=replica)

    def _admit(self, chat: ChatRequest, *, caller: Caller, terms: Terms, version: str) -> Exchange:
        started, served_at = time.monotonic(), datetime.now(UTC)
        self._refuse_oversized(chat)
        consent = narrowed(caller.consent, terms.consent)
        match = self._conversations.find(
            chat.messages, scope=_scope(caller, user=chat.user, session_id=terms.session_id)
        )
        prompt_ids, extends = self._prompt(chat, match)
        return Exchange(
            interaction_id=self._new_id(),
            caller=caller,
            consent=consent,
            chat=chat,
            sampling=self._bounded(chat.sampling, num_prompt=len(prompt_ids)),
            user=self._users.hash(chat.user, tenant=caller.tenant),
            prompt_ids=prompt_ids,
            lineage=self._lineage(match, extends=extends, consent=consent, terms=terms),
            policy=self.policy,
            policy_version=version,
            renderer=self._renderer.name,
            served_at=served_at,
            started=started,
        )

    def _refuse_oversized(self, chat: ChatRequest) -> None:
        """What cannot fit is refused by its bytes: rendering it would hold up everybody else."""
        size = sum(len(message["content"].encode()) for message in chat.messages)
        if size > self.config.max_model_len * self._renderer.longest_token:
            raise RequestRefused(
                f"{size} bytes of messages exceed the {self.config.max_model_len} tokens of this "
                "model",
                400,
                "messages",
                "context_length_exceeded",
            )

    def _prompt(self, chat: ChatRequest, match: Match | None) -> tuple[Sequence[int], bool]:
        """Known tokens and what follows them (True), or everything rendered anew (False)."""
        if match is not None and match.turn.whole:
            known = match.turn.token_ids
            rest = self._renderer.extend(
                chat.messages, num_known=match.num_messages, last_id=known[-1]
            )
            if rest:
                self.metrics.extended.labels("yes").inc()
                return known + array("i", rest), True
        if any(message["role"] == "assistant" for message in chat.messages):
            self.metrics.extended.labels("no").inc()
        return self._renderer.render(chat.messages), False

    def _bounded(self, sampling: Sampling, *, num_prompt: int) -> Sampling:
        room = self.config.max_model_len - num_prompt
        wanted = sampling.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            raise RequestRefused(
                f"{num_prompt} prompt tokens and {wanted or 1} to sample exceed the "
                f"{self.config.max_model_len} tokens of this model",
                400,
                "messages" if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        return sampling.model_copy(update={"max_tokens": wanted or room})

    def _lineage(
        self, match: Match | None, *, extends: bool, consent: Consent, terms: Terms
    ) -> Lineage:
        if match is None:
            return Lineage(session_id=terms.session_id or self._new_id())
        turn = match.turn
        # A row must be readable under its own consent, so it never leans on a narrower one.
        covered = narrowest(turn.consent, consent) == consent
        if not (extends and turn.logged and covered):
            return Lineage(session_id=turn.session_id)
        return Lineage(
            session_id=turn.session_id,
            parent_id=turn.interaction_id,
            parent_choice=turn.choice_index,
            prefix_length=len(turn.token_ids),
        )

    def _start(self, exchange: Exchange, *, replica: Replica) -> Answer:
        choices = [
            Choice(
                self._generate(exchange, index=index),
                index=index,
                decode=self._renderer.decode,
                stops=exchange.sampling.stop,
            )
            for index in range(exchange.chat.num_choices)
        ]

        def on_end(answer: Answer) -> None:
            replica.num_running -= 1
            self._answers.discard(answer)
            self.metrics.in_flight.set(self.num_in_flight)
            try:
                self._finish(exchange, answer, replica=replica)
            except Exception:
                self.metrics.lost.labels("fault").inc()
                logger.exception("an interaction was not logged")

        answer = Answer(
            choices,
            engine=replica.engine,
            max_tokens=exchange.sampling.max_tokens or self.config.max_model_len,
            drain_s=self.config.timeouts.drain_s,
            on_end=on_end,
        )
        replica.num_running += 1
        self._answers.add(answer)
        self.metrics.in_flight.set(self.num_in_flight)
        return answer

    def _generate(self, exchange: Exchange, *, index: int) -> Generate:
        sampling = exchange.sampling
        parameters: dict[str, object] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sorted(self._renderer.end_ids),
            # The engine needs text only to look for stop strings.
            "detokenize": bool(sampling.stop),
        }
        if sampling.stop:
            parameters["stop"] = sampling.stop
        if sampling.seed is not None:
            parameters["seed"] = sampling.seed + index
        return Generate(
            request_id=f"{exchange.interaction_id}-{index}",
            token_ids=exchange.prompt_ids,
            sampling=parameters,
            cache_salt=_cache_salt(exchange.caller.tenant, exchange.policy_version),
        )

    def _finish(self, exchange: Exchange, answer: Answer, *, replica: Replica) -> None:
        """Count, log and remember an answer that has ended."""
        self._note_replica(answer, replica=replica)
        self._count(exchange, answer)
        if not answer.left and not any(choice.sampled.token_ids for choice in answer.choices):
            return  # nothing was served: the caller got an error
        logged = self._log(exchange, answer)
        if not answer.left and exchange.consent != "none":
            for choice in answer.choices:
                self._remember(exchange, choice, logged=logged)

    def _note_replica(self, answer: Answer, *, replica: Replica) -> None:
        if answer.last_version is not None and not answer.failure:
            self.pool.saw(replica, answer.last_version)
        elif answer.failure is not None and answer.failure.status == 503 and not answer.left:
            self.pool.lost(replica, answer.failure)

    def _count(self, exchange: Exchange, answer: Answer) -> None:
        metrics = self.metrics
        metrics.tokens.labels("prompt").inc(len(exchange.prompt_ids))
        for choice in answer.choices:
            metrics.tokens.labels("completion").inc(len(choice.sampled.token_ids))
            metrics.answers.labels(choice.sampled.finish_reason).inc()
        if answer.first_token_at is not None and answer.last_token_at is not None:
            metrics.ttft.observe(answer.first_token_at - exchange.started)
            metrics.latency.observe(answer.last_token_at - exchange.started)

    def _log(self, exchange: Exchange, answer: Answer) -> bool:
        if exchange.consent == "none":
            self.metrics.withheld.inc()
            return False
        event = exchange.event(
            [choice.sampled.completion() for choice in answer.choices],
            first_token_at=answer.first_token_at,
            last_token_at=answer.last_token_at,
        )
        if not event.trainable:
            self.metrics.untrainable.inc()
        record = Record(
            topic=INTERACTIONS_TOPIC,
            key=event.session_id,
            value=event.model_dump_json().encode(),
        )
        try:
            self._sink.put(record)
        except SpoolFull as error:
            self.metrics.lost.labels("spool_full").inc()
            logger.error("an interaction was served and not logged", extra={"error": str(error)})
            return False
        return True

    def _remember(self, exchange: Exchange, choice: Choice, *, logged: bool) -> None:
        if choice.sampled.finish_reason not in ("stop", "length"):
            return
        turn = Turn(
            interaction_id=exchange.interaction_id,
            choice_index=choice.sampled.choice_index,
            session_id=exchange.lineage.session_id,
            token_ids=array("i", [*exchange.prompt_ids, *choice.sampled.token_ids]),
            consent=exchange.consent,
            whole=choice.cut_at is None,
            logged=logged,
        )
        answer = {"role": "assistant", "content": choice.text}
        scope = _scope(exchange.caller, user=exchange.chat.user, session_id=None)
        self._conversations.remember([*exchange.chat.messages, answer], turn, scope=scope)


def _scope(caller: Caller, *, user: str | None, session_id: str | None) -> Scope:
    return Scope(tenant=caller.tenant, user=user, session_id=session_id)


def _cache_salt(tenant: str, version: str) -> str:
    """Keys and values are shared by no two tenants, and by no two versions.

    A hash, because vLLM refuses salts with a slash or of more than 128 characters.
    """
    return hashlib.sha256(f"{tenant}:{version}".encode()).hexdigest()
