"""HTTP/1.1 for uvicorn, whose parser keeps a head of any length and waits for it for ever.

Bodies are bounded where they are read, in `http`.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedHttp(HttpToolsProtocol):
    """Gives up on heads that are too long or too slow.

    AWAITING a head (`_timer` runs) -> body and answer -> idle, or AWAITING the next one
    """

    max_head_bytes = 64 * 2**10
    """Request line and headers; more gets 400. One read of the connection more may be kept."""
    timeout_s = 30.0
    """For a new connection to bring a whole head, or a kept one to end a head that it began."""

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Read, and count what belongs to a head that has not ended yet."""
        super().data_received(data)
        if self._timer is None or self.transport.is_closing():
            return
        self._num_bytes += len(data)
        if self._num_bytes > self.max_head_bytes:
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """It has ended."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """There will be no other."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._num_bytes = 0
        if self._timer is None:
            self._timer = self.loop.call_later(self.timeout_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded_http(*, max_head_bytes: int, timeout_s: float) -> type[BoundedHttp]:
    """The protocol with these bounds, in the form that uvicorn takes."""

    class Configured(BoundedHttp):
        pass

    Configured.max_head_bytes = max_head_bytes
    Configured.timeout_s = timeout_s
    return Configured
