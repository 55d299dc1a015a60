"""HTTP/1.1 for uvicorn with bounded request heads.

Uvicorn's own parser accepts a head of any length and waits for it for ever. Bodies are bounded
where they are read, in `asgi.read_json`.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedHttp(HttpToolsProtocol):
    """Closes connections whose request head is too long or too slow.

    AWAITING a head (`_timer` runs) -> body and answer -> idle, or AWAITING the next one
    """

    max_head_bytes = 64 * 2**10
    """Bytes of request line and headers; more gets 400. Up to one read more may be buffered."""
    timeout_s = 30.0
    """Seconds for a new connection to send a whole head, or a kept one to end a head it began."""

    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Parse the data, and count the bytes of a head that has not ended yet."""
        super().data_received(data)
        if self._timer is None or self.transport.is_closing():
            return
        self._num_bytes += len(data)
        if self._num_bytes > self.max_head_bytes:
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """Start the timer for a head that begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """Stop the timer, because the head has ended."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, because the connection has ended."""
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
    """The protocol class with these bounds, as uvicorn's `http` argument takes it."""

    class Configured(BoundedHttp):
        pass

    Configured.max_head_bytes = max_head_bytes
    Configured.timeout_s = timeout_s
    return Configured
