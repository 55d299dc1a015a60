"""Asks addresses whether something answers there: used by `doctor`, `up` and the tests."""

import http.client
import re
import socket
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from onlinerl.errors import ConfigError

_NO_VERIFICATION = ssl.create_default_context()
_NO_VERIFICATION.check_hostname = False
_NO_VERIFICATION.verify_mode = ssl.CERT_NONE


def parse_address(url: str) -> tuple[str, int]:
    """Host and port of `http://host:port` or `host:port`.

    The host defaults to 127.0.0.1, the port to that of the scheme.

    Raises:
        ConfigError: the port is not a number from 0 to 65535.
    """
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{redact_credentials(url)}: {error}") from error
    return parts.hostname or "127.0.0.1", port or (443 if parts.scheme == "https" else 80)


def redact_credentials(url: str) -> str:
    """The URL without user and password, so that it can be printed."""
    return re.sub(r"//[^/@]*@", "//", url)


def is_port_open(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Whether something accepts TCP connections on `host:port`."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def http_problem(url: str, *, timeout_s: float = 2.0, secret: str | None = None) -> str | None:
    """Why `url` does not answer a GET with a 2xx status; None when it does.

    Certificates are not verified, because the question is only whether something answers.

    Args:
        url: The address; user and password in it are not repeated in the result.
        timeout_s: Seconds to wait for the connection and for each read.
        secret: Bearer token, which the guard of an engine asks for.
    """
    printable = redact_credentials(url)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        context = _NO_VERIFICATION if url.startswith("https:") else None
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as response:
            return None if response.status < 300 else f"{printable} answers {response.status}"
    except urllib.error.HTTPError as error:
        return f"{printable} answers {error.code}: {error.read(300).decode(errors='replace')}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{printable}: {error}"
