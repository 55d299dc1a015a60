"""One request being answered: takes an engine's chunks, gives pieces, and keeps the exact tokens.

The answer runs in its own task, not in the caller's. When the caller goes away it lives on until
the engine has reported what was sampled.
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

    RUNNING is bounded by the engine's idle timeout and LEAVING by `drain_s`.

    Args:
        choices: The completions to sample.
        engine: What samples them.
        streamed: Whether pieces are wanted as they come.
        drain_s: Seconds to wait for the last chunk after the caller left.
        on_end: Called once on the event loop, after the reader was told about the end.
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
        """Why the answer is incomplete; None while it runs, and when it is whole."""
        self.has_left = False
        """Whether the caller went away before the end."""
        self.asked_at = time.monotonic()
        """When the engine was asked; this time and the next ones are of `time.monotonic`."""
        self.first_token_at: float | None = None
        """When the first token came; None for an answer that comes whole."""
        self.last_token_at: float | None = None
        self.answered_at = self.asked_at
        """When the engine last sent something."""
        self._engine = engine
        self._streamed = streamed
        self._drain_s = drain_s
        self._on_end = on_end
        self._ready: list[Piece] = []
        self._reader: asyncio.Future[None] | None = None
        self._is_over = False
        self._ended = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._cut_off: list[Choice] = []
        self._pumping = asyncio.create_task(self._pump_all())
        self._pumping.add_done_callback(self._end)

    async def batches(self) -> AsyncIterator[Sequence[Piece]]:
        """Yield pieces as they come, all that have come at once; for one reader.

        A slow reader holds up nobody: what waits for it is bounded by the answer's tokens.

        Raises:
            EngineFailed: at the end, when the answer is incomplete.
        """
        while self._ready or not self._is_over:
            if not self._ready:
                await self._wait_for_more()
                continue
            batch, self._ready = self._ready, []
            yield batch
        if self.failure is not None:
            raise self.failure

    async def wait_outcomes(self) -> Sequence[Outcome]:
        """Wait for the end and return every choice; none when the caller left.

        Raises:
            EngineFailed: when the answer is incomplete.
        """
        while not self._is_over:
            await self._wait_for_more()
        if self.failure is not None:
            raise self.failure
        return [] if self.has_left else [choice.outcome for choice in self.choices]

    def leave(self) -> None:
        """Note that the caller went away: stop the engine and keep what was sampled."""
        if self._leaving is None and not self._is_over:
            self.has_left = True
            self._cut_off = [choice for choice in self.choices if not choice.has_ended]
            self._leaving = asyncio.create_task(self._drain())

    async def wait_ended(self) -> None:
        """Wait until the answer has ended and `on_end` was called."""
        await self._ended.wait()

    def cancel(self) -> None:
        """End now, with the tokens that have come."""
        self._pumping.cancel()

    async def _wait_for_more(self) -> None:
        """Wait until there are pieces, or until the end."""
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
        is_abort_sent = False
        async for chunk in self._engine.generate(choice.request):
            self._note(chunk)
            pieces = choice.take(chunk)
            if pieces and self._streamed:
                self._ready += pieces
                self._wake()
            if choice.is_cut and not choice.has_ended and not is_abort_sent:
                is_abort_sent = True
                await self._abort(choice)
        reason = choice.sampled.finish_reason
        if reason not in WHOLE and not self.has_left:
            raise EngineAborted(f"the engine ended the answer with {reason!r}")

    def _note(self, chunk: Chunk) -> None:
        self.answered_at = now = time.monotonic()
        if chunk.token_ids:
            self.last_token_at = now
            # When an answer comes whole, the time of its first token is not known.
            if self.first_token_at is None and self._streamed:
                self.first_token_at = now

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await asyncio.gather(*(self._abort(choice) for choice in self._cut_off))
                await asyncio.wait({self._pumping})
        except TimeoutError:
            # Closing the stream also stops the engine, but then it reports no version spans.
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
        self._is_over = True
        self._wake()
        # The caller gets the end of the answer first, then the answer is logged.
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
