"""From the bytes of an engine's event stream to the chunks that the gateway works with."""

from collections.abc import Iterator
from dataclasses import replace

from onlinerl.errors import EngineAborted
from onlinerl.serving.encoding.sse import DONE, EventFramer
from onlinerl.serving.engine_client.completions_api import merge_chunks, parse_chunk
from onlinerl.serving.interaction.engine import Chunk


class ChunkAssembler:
    """Reads one streamed completion: call `feed` for everything that arrives, then `finish`.

    Tokens that arrive together leave together, so that a busy gateway handles fewer, larger chunks.
    The first token leaves alone: its reader waits for no other.

    Args:
        num_top: Most likely tokens to keep at every place.
    """

    def __init__(self, *, num_top: int) -> None:
        self._num_top = num_top
        self._framer = EventFramer()
        self._has_begun = False
        self._last: Chunk | None = None

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The chunks in `data`, without the last one of the completion.

        Raises:
            EngineFailed: for an error event, or one that cannot be read.
            ValueError: when an event is too large.
        """
        arrived: list[Chunk] = []
        for event in self._framer.feed(data):
            if event == DONE:
                break
            chunk = parse_chunk(event, num_top=self._num_top)
            if self._last is not None:
                self._note_usage(chunk)
            elif chunk.finish_reason is not None:
                self._last = chunk
            elif chunk.token_ids and not self._has_begun:
                self._has_begun = True
                yield chunk
            elif chunk.token_ids:
                arrived.append(chunk)
        yield from merge_chunks(arrived)

    def finish(self) -> Chunk:
        """The last chunk, with the usage that followed it.

        Raises:
            EngineAborted: when the stream ended without a finish reason.
        """
        if self._last is None:
            raise EngineAborted("the engine broke off an answer")
        return self._last

    def _note_usage(self, chunk: Chunk) -> None:
        if self._last is not None and chunk.num_cached_tokens is not None:
            self._last = replace(self._last, num_cached_tokens=chunk.num_cached_tokens)
