"""Answers requests of every protocol: render, route, sample, log.

HTTP is in `http.protocol_route`, and each protocol is a `Wire`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from onlinerl.errors import RequestRefused
from onlinerl.rollout_store.schema import Consent, Sampling
from onlinerl.rollout_store.user_hash import UserHasher
from onlinerl.serving.access.admission import Ticket
from onlinerl.serving.capture.recorder import Recorder
from onlinerl.serving.config import GatewayConfig
from onlinerl.serving.conversations.memory import Conversations
from onlinerl.serving.gateway.answer import Answer
from onlinerl.serving.gateway.choice import Choice
from onlinerl.serving.gateway.constraint import (
    Grammar,
    engine_parameters,
    grammar_of,
    resolve_request,
)
from onlinerl.serving.gateway.logprob_view import LogprobView
from onlinerl.serving.gateway.prompts import Prompt, Prompts, num_bytes, prompt_param, tools_of
from onlinerl.serving.gateway.shadow import Shadows
from onlinerl.serving.interaction.caller import Caller, narrow_consent
from onlinerl.serving.interaction.engine import Generate
from onlinerl.serving.interaction.events import EventSink
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.ids import uuid7
from onlinerl.serving.interaction.request import Conversation, Request
from onlinerl.serving.observability.metrics import GatewayMetrics
from onlinerl.serving.rendering.protocol import Renderer
from onlinerl.serving.routing.failover import Route
from onlinerl.serving.routing.replicas import ReplicaPool
from onlinerl.serving.routing.router import Router

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a caller sends about a request beside its body, unchecked."""

    session_id: str | None = None
    consent: str | None = None


@dataclass(frozen=True, kw_only=True)
class _PreparedRequest:
    """A request that can be served, before a replica is chosen for it."""

    request: Request
    consent: Consent
    prompt: Prompt
    sampling: Sampling
    grammar: Grammar | None


class Gateway:
    """Answers requests and logs every token that was sampled for them.

    It belongs to one event loop. `close` waits for the running answers; their number is bounded
    before they come here, by `Admission`.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        policy: str,
        router: Router,
        renderer: Renderer,
        sink: EventSink,
        metrics: GatewayMetrics,
        users: UserHasher,
        new_id: Callable[[], str] = uuid7,
    ) -> None:
        self.config = config
        self.policy = policy
        self.metrics = metrics
        self.renderer = renderer
        self.router = router
        self._recorder = Recorder(sink, metrics)
        self._users = users
        self._new_id = new_id
        self._prompts = Prompts(
            renderer,
            Conversations(
                max_turns=config.limits.max_conversations,
                max_tokens=config.limits.max_conversation_tokens,
            ),
            metrics=metrics,
            max_model_len=config.max_model_len,
            new_id=new_id,
        )
        self._answers: set[Answer] = set()
        self._shadows = Shadows(
            router,
            config=config.arms,
            is_busy=self._is_busy,
            log=self._recorder.store,
            new_id=new_id,
        )

    @property
    def pool(self) -> ReplicaPool:
        """The engines."""
        return self.router.pool

    async def start(self) -> None:
        """Check every engine once, then go on checking in the background."""
        await self.router.start()

    async def close(self) -> None:
        """Wait for running answers up to `timeouts.shutdown_s`, then cut them off; log all."""
        running = list(self._answers)
        try:
            async with asyncio.timeout(self.config.timeouts.shutdown_s):
                await asyncio.gather(*(answer.wait_ended() for answer in running))
        except TimeoutError:
            for answer in running:
                answer.cancel()
            await asyncio.gather(*(answer.wait_ended() for answer in running))
        await self._shadows.close()
        await self.router.close()

    @property
    def num_in_flight(self) -> int:
        """Running answers, including those whose caller has left."""
        return len(self._answers)

    def begin(
        self, request: Request, *, caller: Caller, terms: Terms, ticket: Ticket | None = None
    ) -> tuple[Exchange, Answer]:
        """Start to answer a request.

        Args:
            request: What is asked.
            caller: Who asks.
            terms: What was sent beside the body.
            ticket: The admission of the request; released when the answer has ended.

        Raises:
            RequestRefused: over a limit, for another model, or when no engine serves. The caller
                of this method then releases the ticket.
        """
        started = time.monotonic()
        prepared = self._prepare(request, caller=caller, terms=terms)
        prompt = prepared.prompt
        if ticket is not None:
            ticket.reserve(
                num_prompt_bytes=num_bytes(prepared.request.prompt),
                max_tokens=prepared.sampling.max_tokens or 0,
                num_choices=prepared.request.num_choices,
            )
        route = self.router.route(
            session_id=prompt.lineage.session_id,
            known=prompt.session_is_known,
            tenant=caller.tenant,
        )
        exchange = self._make_exchange(prepared, caller=caller, route=route, started=started)
        return exchange, self._start(exchange, prompt, route=route, ticket=ticket)

    def _prepare(self, request: Request, *, caller: Caller, terms: Terms) -> "_PreparedRequest":
        self._check_model(request.model, caller=caller)
        request = resolve_request(request)
        grammar = grammar_of(request, self.renderer)
        consent = narrow_consent(caller.consent, terms.consent)
        session_id = terms.session_id or request.session_id
        prompt = self._prompts.make(request, caller=caller, consent=consent, session_id=session_id)
        return _PreparedRequest(
            request=request,
            consent=consent,
            prompt=prompt,
            sampling=self._bound_sampling(request, num_prompt=len(prompt.token_ids)),
            grammar=grammar,
        )

    def _make_exchange(
        self, prepared: "_PreparedRequest", *, caller: Caller, route: Route, started: float
    ) -> Exchange:
        request, prompt = prepared.request, prepared.prompt
        return Exchange(
            interaction_id=self._new_id(),
            caller=caller,
            consent=prepared.consent,
            request=request,
            sampling=prepared.sampling,
            grammar=prepared.grammar,
            user=self._users.hash(request.user, tenant=caller.tenant),
            prompt_ids=prompt.token_ids,
            lineage=prompt.lineage,
            policy=self.policy,
            version=lambda: route.version,
            arm=route.arm,
            arm_probability=route.arm_probability,
            renderer=self.renderer.name(tools_of(request)),
            served_at=datetime.now(UTC),
            started=started,
        )

    def count_tokens(self, request: Request, *, caller: Caller, terms: Terms) -> int:
        """Number of tokens that the prompt of a request has now; no engine is asked.

        Raises:
            RequestRefused: for another model, or a prompt that cannot be rendered.
        """
        self._check_model(request.model, caller=caller)
        session_id = terms.session_id or request.session_id
        return self._prompts.count(resolve_request(request), caller=caller, session_id=session_id)

    def _check_model(self, model: str, *, caller: Caller) -> None:
        if model != self.policy:
            raise RequestRefused(
                f"there is no model {model!r}: this gateway serves {self.policy!r}",
                404,
                "model",
                "model_not_found",
            )
        caller.check_policy(model)

    def _bound_sampling(self, request: Request, *, num_prompt: int) -> Sampling:
        sampling = request.sampling
        room = self.config.max_model_len - num_prompt
        wanted = sampling.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            raise RequestRefused(
                f"{num_prompt} prompt tokens and {wanted or 1} to sample exceed the "
                f"{self.config.max_model_len} tokens of this model",
                400,
                prompt_param(request) if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        return sampling.model_copy(update={"max_tokens": wanted or room})

    def _start(
        self, exchange: Exchange, prompt: Prompt, *, route: Route, ticket: Ticket | None
    ) -> Answer:
        def on_end(answer: Answer) -> None:
            self._answers.discard(answer)
            self.metrics.in_flight.set(self.num_in_flight)
            if ticket is not None:
                ticket.release(num_tokens=_num_tokens(exchange, answer))
            try:
                self._finish(exchange, answer, prompt)
            except Exception:
                self.metrics.lost.labels("fault").inc()
                logger.exception("an interaction was not logged")

        choices = [self._choice(exchange, index=n) for n in range(exchange.request.num_choices)]
        answer = Answer(
            choices,
            engine=route,
            streamed=exchange.request.stream,
            drain_s=self.config.timeouts.drain_s,
            on_end=on_end,
        )
        self._answers.add(answer)
        self.metrics.in_flight.set(self.num_in_flight)
        self._shadows.offer(exchange, [choice.request for choice in choices], after=route)
        return answer

    def _choice(self, exchange: Exchange, *, index: int) -> Choice:
        request, renderer = exchange.request, self.renderer
        num_top = request.top_logprobs
        prompt = request.prompt
        return Choice(
            Generate(
                request_id=f"{exchange.interaction_id}-{index}",
                token_ids=exchange.prompt_ids,
                sampling=engine_parameters(
                    exchange.sampling,
                    choice_index=index,
                    end_ids=renderer.end_ids,
                    grammar=exchange.grammar,
                ),
                top_logprobs=num_top or 0,
                # The answer is cut off before a second call, so its tokens have to stream in.
                streamed=request.stream or not request.tool_choice.parallel,
            ),
            index=index,
            parser=renderer.parser(
                prompt if isinstance(prompt, Conversation) else None,
                choice_index=index,
                stops=exchange.sampling.stop,
                parse_tools=bool(tools_of(request)),
            ),
            parallel_calls=request.tool_choice.parallel,
            view=None if num_top is None else LogprobView(renderer.token_text, num_top=num_top),
        )

    def _finish(self, exchange: Exchange, answer: Answer, prompt: Prompt) -> None:
        """Count, log and remember an answer that has ended."""
        self._recorder.count(exchange, answer)
        if not answer.has_left and not any(choice.sampled.token_ids for choice in answer.choices):
            return  # nothing was served; the caller got an error
        logged = self._recorder.log(exchange, answer)
        if not answer.has_left and exchange.consent != "none":
            for choice in answer.choices:
                self._prompts.remember(exchange, prompt, choice, logged=logged)

    def _is_busy(self) -> bool:
        """Whether no shadow answer may begin now."""
        load = self.num_in_flight / self.config.limits.max_in_flight
        return load >= self.config.arms.shadow_load


def _num_tokens(exchange: Exchange, answer: Answer) -> int:
    sampled = sum(len(choice.sampled.token_ids) for choice in answer.choices)
    return len(exchange.prompt_ids) + sampled
