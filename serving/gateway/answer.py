"""One request being answered: chunks of an engine in, pieces out, and the exact tokens kept.

The answer lives in its own task, not in the caller's: when the caller goes away it stays alive
long enough to learn what was sampled.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from onlinerl.errors import AnswerCutOff, EngineAborted, EngineFailed, GatewayFault
from onlinerl.serving.gateway.choice import WHOLE, Choice
from onlinerl.serving.interaction.engine import Chunk, Sampler
from onlinerl.serving.interaction.pieces import Outcome, Piece

logger = logging.getLogger(__name__)


class Answer:
    """All choices of one request.

    RUNNING ──every choice ended, or an engine failed──────────────► ENDED
    RUNNING ──`leave`: abort sent──► LEAVING ──drained, or drain_s──► ENDED

    `on_end` is called once, on the event loop, right after the reader was told that ENDED is
    reached. Bounded by the engine's idle timeout while RUNNING and by `drain_s` while LEAVING.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        *,
        engine: Sampler,
        streamed: bool,
        drain_s: float,
        on_end: Callable[["Answer"], None],
    ) -> None:
        self.choices = choices
        self.failure: EngineFailed | None = None
        """Why the answer is not whole."""
        self.left = False
        """Whether the caller went away before the end."""
        self.asked_at = time.monotonic()
        """`time.monotonic` when the engine was asked."""
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.answered_at = self.asked_at
        """When the engine sent something last."""
        self._engine = engine
        self._streamed = streamed
        self._drain_s = drain_s
        self._on_end = on_end
        self._ready: list[Piece] = []
        self._reader: asyncio.Future[None] | None = None
        self._over = False
        self._ended = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._cut_off: list[Choice] = []
        self._pumping = asyncio.create_task(self._pump_all())
        self._pumping.add_done_callback(self._end)

    async def batches(self) -> AsyncIterator[Sequence[Piece]]:
        """Pieces as they come, all that are there at once; for one reader.

        A slow reader makes nobody wait: what it has not taken is bounded by the answer's tokens.

        Raises:
            EngineFailed: at the end, when the answer is not whole.
        """
        while self._ready or not self._over:
            if not self._ready:
                await self._something()
                continue
            batch, self._ready = self._ready, []
            yield batch
        if self.failure is not None:
            raise self.failure

    async def whole(self) -> Sequence[Outcome]:
        """The choices when all have ended; empty when the caller left.

        Raises:
            EngineFailed: when the answer is not whole.
        """
        while not self._over:
            await self._something()
        if self.failure is not None:
            raise self.failure
        return [] if self.left else [choice.outcome for choice in self.choices]

    def leave(self) -> None:
        """The caller went away: stop the engine, keep what was sampled."""
        if self._leaving is None and not self._over:
            self.left = True
            self._cut_off = [choice for choice in self.choices if not choice.ended]
            self._leaving = asyncio.create_task(self._drain())

    async def ended(self) -> None:
        """Wait until nothing of it runs and `on_end` was called."""
        await self._ended.wait()

    def cancel(self) -> None:
        """End now, with what there is."""
        self._pumping.cancel()

    async def _something(self) -> None:
        """Wait for pieces, or for the end."""
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _pump_all(self) -> None:
        if len(self.choices) == 1:
            await self._pump(self.choices[0])
            return
        async with asyncio.TaskGroup() as group:
            for choice in self.choices:
                group.create_task(self._pump(choice))

    async def _pump(self, choice: Choice) -> None:
        asked_to_stop = False
        async for chunk in self._engine.generate(choice.request):
            self._note(chunk)
            pieces = choice.take(chunk)
            if pieces and self._streamed:
                self._ready += pieces
                self._wake()
            if choice.is_cut and not choice.ended and not asked_to_stop:
                asked_to_stop = True
                await self._abort(choice)
        reason = choice.sampled.finish_reason
        if reason not in WHOLE and not self.left:
            raise EngineAborted(f"the engine ended the answer with {reason!r}")

    def _note(self, chunk: Chunk) -> None:
        self.answered_at = now = time.monotonic()
        if chunk.token_ids:
            self.last_token_at = now
            # Of an answer that comes whole nobody knows when its first token was sampled.
            if self.first_token_at is None and self._streamed:
                self.first_token_at = now

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await asyncio.gather(*(self._abort(choice) for choice in self._cut_off))
                await asyncio.wait({self._pumping})
        except TimeoutError:
            # Closing the stream makes the engine stop too, but tells no version spans.
            self._pumping.cancel()

    async def _abort(self, choice: Choice) -> None:
        try:
            await self._engine.abort(choice.request.request_id)
        except EngineFailed as error:
            logger.warning("abort failed", extra={"engine": self._engine.url, "error": str(error)})

    def _end(self, pumping: asyncio.Task[None]) -> None:
        self.failure = _failure(pumping)
        for choice in self.choices:
            if choice in self._cut_off:
                choice.sampled.finish_reason = "client_disconnect"
            elif choice.sampled.finish_reason is None:
                choice.sampled.finish_reason = "error"
        self._over = True
        self._wake()
        # The caller gets the end of its answer first, then it is logged.
        asyncio.get_running_loop().call_soon(self._finish)

    def _finish(self) -> None:
        try:
            self._on_end(self)
        finally:
            self._ended.set()


def _failure(pumping: asyncio.Task[None]) -> EngineFailed | None:
    if pumping.cancelled():
        return AnswerCutOff("the answer was cut off")
    error = pumping.exception()
    if error is None:
        return None
    failures = [leaf for leaf in _leaves(error) if isinstance(leaf, EngineFailed)]
    if failures:
        return failures[0]
    logger.error("an answer failed", exc_info=error)
    return GatewayFault("the gateway failed to read the answer")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
