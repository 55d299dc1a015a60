"""Serves liveness, readiness and metrics of a process that is not a web server itself."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from onlinerl.errors import ConfigError


class HealthServer:
    """Serves `/health/live`, `/health/ready` and `/metrics` from a daemon thread.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 turns the server off.
        ready: Returns None when the process is ready, else the reason why not. It is called from
            threads of the server.
    """

    def __init__(self, host: str, port: int, *, ready: Callable[[], str | None]) -> None:
        self._host = host
        self._port = port
        self._ready = ready
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> Self:
        """Bind the port and answer from now on. Call it once per object.

        Raises:
            ConfigError: the port cannot be bound.
        """
        if self._port == 0:
            return self
        try:
            self._server = ThreadingHTTPServer((self._host, self._port), _handler(self._ready))
        except OSError as error:
            raise ConfigError(
                f"health port {self._host}:{self._port} cannot be bound ({error.strerror}); "
                "set another health_port"
            ) from error
        thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        thread.start()
        return self

    def stop(self) -> None:
        """Stop answering and free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _handler(ready: Callable[[], str | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path == "/health/live":
                self._answer(200, {"status": "live"})
            elif self.path == "/health/ready":
                reason = ready()
                if reason is None:
                    self._answer(200, {"status": "ready"})
                else:
                    self._answer(503, {"status": "not ready", "reason": reason})
            elif self.path == "/metrics":
                self._metrics()
            else:
                self._answer(404, {"error": f"no such path: {self.path}"})

        def _metrics(self) -> None:
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            self._send(200, generate_latest(), CONTENT_TYPE_LATEST)

        def _answer(self, status: int, body: dict[str, str]) -> None:
            self._send(status, json.dumps(body).encode(), "application/json")

        def _send(self, status: int, payload: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because probes come every second."""

    return Handler
