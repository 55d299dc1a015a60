"""The gateway's port, its certificate, and the web pages that may call it."""

import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from onlinerl.errors import ConfigError
from onlinerl.serving.config import CorsConfig, TlsConfig

logger = logging.getLogger(__name__)

EXPOSED_HEADERS = (
    "retry-after",
    "x-onlinerl-interaction-id",
    "x-onlinerl-session-id",
    "x-onlinerl-policy-version",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
)
"""Headers of a response that a web page may read."""


@contextlib.contextmanager
def open_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket, and close it at the end; port 0 takes a free port.

    Raises:
        ConfigError: when the port is taken or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio only switches Nagle's algorithm off when the protocol is given. With it, a response
    # waits 40 ms for the acknowledgement of its headers.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"[gateway] cannot listen on {host}:{port} ({error.strerror}): set another port"
            ) from error
        logger.info("gateway listens", extra={"address": listener.getsockname()[:2]})
        yield listener


def tls_context(config: TlsConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or later as configured; None for plain HTTP.

    Raises:
        ConfigError: naming a file that is missing, unreadable, or of the wrong kind.
    """
    if not config.cert:
        return None
    for field in ("cert", "key", "client_ca"):
        _check_readable(field, getattr(config, field))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a callback OpenSSL would wait for a passphrase from the terminal.
        context.load_cert_chain(config.cert, config.key, password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"[gateway.tls] cert {config.cert!r} and key {config.key!r} are no PEM pair without a "
            f"passphrase ({error})"
        ) from error
    if config.client_ca:
        _require_client(context, config.client_ca)
    return context


def with_cors(app: ASGIApp, config: CorsConfig) -> ASGIApp:
    """Let web pages of the configured origins call the application; unchanged without origins.

    Any request header is allowed, because the clients of OpenAI and Anthropic send many of their
    own. A browser adds no secret to them by itself.
    """
    if not config.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED_HEADERS,
        max_age=config.max_age_s,
    )


def _check_readable(field: str, path: str) -> None:
    if not path:
        return
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(
            f"[gateway.tls] {field} = {path!r} cannot be read: {error.strerror}"
        ) from error


def _require_client(context: ssl.SSLContext, client_ca: str) -> None:
    try:
        context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"[gateway.tls] client_ca = {client_ca!r} holds no PEM certificates ({error})"
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED
