"""Ordered shutdown: not ready immediately, not listening after a grace period, then no process."""

import asyncio
import json
import logging
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

READY_PATH = "/health/ready"


class Drain:
    """Whether the gateway is shutting down. SERVING -> LEAVING, once."""

    def __init__(self) -> None:
        self.is_leaving = False

    def begin(self) -> None:
        """Report not ready from now on."""
        self.is_leaving = True


class ReadinessGate:
    """Answers readiness checks with 503 during shutdown; other requests are served."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._drain.is_leaving and scope["type"] == "http" and scope["path"] == READY_PATH:
            await _not_ready(send)
        else:
            await self._app(scope, receive, send)


class DrainingServer(uvicorn.Server):
    """SERVING -SIGTERM-> not ready -`grace_s`-> not listening -answers ended-> gone.

    Uvicorn bounds the last step by `timeout_graceful_shutdown`. A second signal skips the grace
    period.
    """

    def __init__(self, config: uvicorn.Config, *, drain: Drain, grace_s: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; the interpreter may call it between any two instructions."""
        if self._drain.is_leaving or self._grace_s == 0:
            self._drain.begin()
            super().handle_exit(sig, frame)
            return
        self._drain.begin()
        leave = super().handle_exit
        self._loop.call_soon_threadsafe(self._loop.call_later, self._grace_s, leave, sig, None)


async def _not_ready(send: Send) -> None:
    body = json.dumps({"ready": False, "reason": "the gateway is stopping"}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
