"""One request being answered: engine chunks in, text out, and the exact tokens kept.

The answer lives in its own task, not in the caller's: when the caller goes away it stays alive
long enough to learn what was sampled.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from onlinerl.errors import EngineFailed
from onlinerl.serving.capture import Sampled, clip_spans
from onlinerl.serving.decoder import Decode, StopFinder, TextStream
from onlinerl.serving.engine_client import Chunk, Engine, Generate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Text that a caller may see; the last one of a choice has a finish reason."""

    choice_index: int
    text: str
    finish_reason: str | None = None


class Choice:
    """One completion on its way: its tokens as sampled, its text as shown."""

    def __init__(
        self, request: Generate, *, index: int, decode: Decode, stops: Sequence[str]
    ) -> None:
        self.request = request
        self.sampled = Sampled(choice_index=index)
        self._pieces: list[str] = []
        self._stream = TextStream(decode)
        self._stop = StopFinder(stops)

    @property
    def text(self) -> str:
        """What the caller was shown so far."""
        return "".join(self._pieces)

    @property
    def cut_at(self) -> str | None:
        """The stop string that ended the text; its tokens are kept, its text is not shown."""
        return self._stop.found

    def take(self, chunk: Chunk) -> Delta:
        """Keep what an engine sent and tell what to show.

        Tokens after the one that completes a stop string were never served and are not kept.
        """
        sampled = self.sampled
        pieces: list[str] = []
        for position, token_id in enumerate(chunk.token_ids):
            if self.cut_at is not None:
                break
            sampled.token_ids.append(token_id)
            sampled.logprobs += chunk.logprobs[position : position + 1]
            pieces.append(self._stop.push(self._stream.push(token_id)))
        sampled.routed_experts = chunk.routed_experts or sampled.routed_experts
        if chunk.finish_reason is not None:
            pieces += self._finish(chunk)
        piece = "".join(pieces)
        self._pieces.append(piece)
        return Delta(
            choice_index=sampled.choice_index, text=piece, finish_reason=sampled.finish_reason
        )

    def _finish(self, chunk: Chunk) -> list[str]:
        pieces = [self._stop.push(self._stream.flush()), self._stop.flush()]
        if chunk.version_spans is not None:
            self.sampled.version_spans = clip_spans(
                chunk.version_spans, num_tokens=len(self.sampled.token_ids)
            )
        self.sampled.finish_reason = "stop" if self.cut_at is not None else chunk.finish_reason
        return pieces


class Answer:
    """All choices of one request.

    RUNNING ──every choice ended, or an engine failed──────────────► ENDED
    RUNNING ──`leave`: abort sent──► LEAVING ──drained, or drain_s──► ENDED

    `on_end` is called once, on the event loop, when ENDED is reached. Bounded by the engine's
    idle timeout while RUNNING and by `drain_s` while LEAVING.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        *,
        engine: Engine,
        max_tokens: int,
        drain_s: float,
        on_end: Callable[["Answer"], None],
    ) -> None:
        self.choices = choices
        self.failure: EngineFailed | None = None
        """Why the answer is not whole."""
        self.left = False
        """Whether the caller went away before the end."""
        self.first_token_at: float | None = None
        """`time.monotonic` of the first token."""
        self.last_token_at: float | None = None
        self.last_version: str | None = None
        """Of the last token of the choice that ended last: what the engine serves now."""
        self._engine = engine
        self._drain_s = drain_s
        self._on_end = on_end
        # A token makes at most one delta; a slow reader makes nobody wait.
        bound = len(choices) * (max_tokens + 2) + 1
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue(maxsize=bound)
        self._leaving: asyncio.Task[None] | None = None
        self._cut_off: list[Choice] = []
        self._pumping = asyncio.create_task(self._pump_all())
        self._pumping.add_done_callback(self._end)

    async def deltas(self) -> AsyncIterator[Delta]:
        """What to show, as it comes; for one reader.

        Raises:
            EngineFailed: at the end, when the answer is not whole.
        """
        while (delta := await self._deltas.get()) is not None:
            yield delta
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        """The caller went away: stop the engine, keep what was sampled."""
        if self._leaving is None and not self._pumping.done():
            self.left = True
            self._cut_off = [c for c in self.choices if c.sampled.finish_reason is None]
            self._leaving = asyncio.create_task(self._drain())

    async def ended(self) -> None:
        """Wait until nothing of it runs."""
        await asyncio.wait({self._pumping})
        # The callback that ends the answer runs in the next turn of the loop.
        await asyncio.sleep(0)

    def cancel(self) -> None:
        """End now, with what there is."""
        self._pumping.cancel()

    async def _pump_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for choice in self.choices:
                group.create_task(self._pump(choice))

    async def _pump(self, choice: Choice) -> None:
        asked_to_stop = False
        async for chunk in self._engine.generate(choice.request):
            self._note_time(chunk)
            if chunk.version_spans:
                self.last_version = chunk.version_spans[-1].version
            delta = choice.take(chunk)
            self._show(delta)
            if choice.cut_at is not None and delta.finish_reason is None and not asked_to_stop:
                asked_to_stop = True
                await self._abort(choice)

    def _show(self, delta: Delta) -> None:
        whole = delta.finish_reason in (None, "stop", "length")
        shown = delta if whole else replace(delta, finish_reason=None)
        if shown.text or shown.finish_reason is not None:
            self._deltas.put_nowait(shown)
        if not whole and not self.left:
            raise EngineFailed(f"the engine ended the answer with {delta.finish_reason!r}")

    def _note_time(self, chunk: Chunk) -> None:
        if chunk.token_ids:
            self.last_token_at = time.monotonic()
            self.first_token_at = self.first_token_at or self.last_token_at

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
        self._deltas.put_nowait(None)
        self._on_end(self)


def _failure(pumping: asyncio.Task[None]) -> EngineFailed | None:
    if pumping.cancelled():
        return EngineFailed("the answer was cut off", 503)
    error = pumping.exception()
    if error is None:
        return None
    failures = [leaf for leaf in _leaves(error) if isinstance(leaf, EngineFailed)]
    if failures:
        return failures[0]
    logger.error("an answer failed", exc_info=error)
    return EngineFailed("the gateway failed to read the answer", 500)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
