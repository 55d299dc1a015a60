"""Answers a share of the requests a second time, with a version whose answers nobody is shown.

A shadow answer delays no caller: it begins after the caller's own answer has begun, the number of
shadow answers is bounded, and none begins while the gateway is busy.

    DRAWN ──busy, too many, no replica──► DROPPED
      └──the caller's answer begins──► ANSWERED ──► LOGGED, or FAILED
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from onlinerl.errors import EngineFailed
from onlinerl.rollout_store.schema import Completion, InteractionEvent
from onlinerl.serving.capture.event import event_of
from onlinerl.serving.config import ArmsConfig
from onlinerl.serving.interaction.engine import Generate
from onlinerl.serving.interaction.exchange import Exchange
from onlinerl.serving.interaction.sampled import Sampled
from onlinerl.serving.routing.failover import Route
from onlinerl.serving.routing.router import Router

logger = logging.getLogger(__name__)


class Shadows:
    """Runs at most `max_shadows` shadow answers at once, in the background of one event loop.

    Args:
        router: Draws the requests and chooses their replicas.
        config: The bounds.
        is_busy: Whether no shadow answer may begin now.
        log: Logs an interaction.
        new_id: Makes interaction ids.
    """

    def __init__(
        self,
        router: Router,
        *,
        config: ArmsConfig,
        is_busy: Callable[[], bool],
        log: Callable[[InteractionEvent], object],
        new_id: Callable[[], str],
    ) -> None:
        self._router = router
        self._config = config
        self._is_busy = is_busy
        self._log = log
        self._new_id = new_id
        self._metrics = router.metrics
        self._running: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Running shadow answers, including those that wait for the caller's answer to begin."""
        return len(self._running)

    def offer(self, exchange: Exchange, requests: Sequence[Generate], *, after: Route) -> None:
        """Answer a request a second time if it is drawn; returns immediately.

        Args:
            exchange: The request; the shadow's differs in id, arm and times only.
            requests: The requests to the engine that answers the caller.
            after: The route of the caller's answer, whose first token the shadow waits for.
        """
        if exchange.consent == "none" or not self._router.draws_shadow(exchange.interaction_id):
            return
        if self._is_busy() or self.num_running >= self._config.max_shadows:
            self._metrics.arms.shadows.labels("dropped_busy").inc()
            return
        task = asyncio.create_task(self._answer(exchange, requests, after=after))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Cancel the running shadow answers."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _answer(
        self, exchange: Exchange, requests: Sequence[Generate], *, after: Route
    ) -> None:
        outcome = "failed"
        try:
            async with asyncio.timeout(self._config.shadow_timeout_s):
                await after.has_begun.wait()
                outcome = await self._answer_now(exchange, requests)
        except EngineFailed as error:
            # The engine's message may quote the request, so it is not logged.
            fields = {"error": type(error).__name__, "status": error.status}
            logger.info("a shadow did not answer", extra=fields)
        except TimeoutError:
            logger.info("a shadow did not answer in time")
        except asyncio.CancelledError:
            outcome = "dropped_stopping"
            raise
        except Exception:
            logger.exception("a shadow failed")
        finally:
            self._metrics.arms.shadows.labels(outcome).inc()

    async def _answer_now(self, exchange: Exchange, requests: Sequence[Generate]) -> str:
        route = self._router.shadow_route(tenant=exchange.caller.tenant)
        if route is None:
            return "dropped_no_replica"
        shadow = replace(
            exchange,
            interaction_id=self._new_id(),
            version=lambda: route.version,
            arm="shadow",
            arm_probability=route.arm_probability,
            served_at=datetime.now(UTC),
            started=time.monotonic(),
        )
        times: list[float] = []
        # One after the other, because nobody waits for a shadow answer.
        completions = [
            await _sample(
                route,
                replace(request, request_id=f"{shadow.interaction_id}-{index}", top_logprobs=0),
                index=index,
                times=times,
            )
            for index, request in enumerate(requests)
        ]
        first, last = (times[0], times[-1]) if times else (None, None)
        self._log(event_of(shadow, completions, first_token_at=first, last_token_at=last))
        return "logged"


async def _sample(route: Route, request: Generate, *, index: int, times: list[float]) -> Completion:
    sampled = Sampled(choice_index=index)
    async for chunk in route.generate(request):
        sampled.token_ids += chunk.token_ids
        sampled.logprobs += chunk.logprobs
        sampled.routed_experts = chunk.routed_experts or sampled.routed_experts
        if chunk.token_ids:
            times.append(time.monotonic())
        if chunk.finish_reason is not None:
            sampled.finish_reason = chunk.finish_reason
            spans = chunk.version_spans
            sampled.version_spans = None if spans is None else list(spans)
    return sampled.completion()
