"""`onlinerl up`: every part on one machine, from one configuration, until Ctrl-C.

The parts are the same processes that run alone in production. This module defines which parts
there are and the order in which they start; `checks.service_checks` tells when each is healthy.
"""

import fcntl
import logging
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from onlinerl.commands.checks import (
    Finding,
    gateway_url,
    port_findings,
    service_checks,
    static_findings,
)
from onlinerl.commands.embedded_broker import tansu_command
from onlinerl.commands.probes import parse_address, redact_credentials
from onlinerl.errors import ConfigError, LeaseHeld
from onlinerl.process.supervisor import Part, Supervisor
from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""Seconds between two looks at the running parts."""

_PARTS_AFTER_SERVICES = ("ingest", "deploy", "gateway", "schedule", "maintain")
"""Parts that start once broker and registry answer."""


def run_up(settings: Settings, *, config: Path, options: Sequence[str]) -> int:
    """Start all parts, print their addresses and keep them running until Ctrl-C or SIGTERM.

    Args:
        settings: The configuration.
        config: The file that `settings` were read from; each part reads it again.
        options: Options of the command line that each part gets after `--config`.

    Returns:
        0, after a stop that was asked for.

    Raises:
        ConfigError: the configuration is wrong; nothing was started.
        LeaseHeld: another `onlinerl up` runs on the same data_dir.
        ServiceUnavailable: a part did not become healthy or died too often; all were stopped.
    """
    console = Console(soft_wrap=True)
    with _lock_data_dir(settings.data_dir), _interrupt_on_signals():
        _refuse_wrong_configuration([*static_findings(settings), *port_findings(settings)])
        supervisor = Supervisor(log_dir=settings.folder("logs"))
        try:
            _start(settings, supervisor, console, config=config, options=options)
            console.print(_summary(settings))
            while True:
                supervisor.check()
                time.sleep(WATCH_INTERVAL_S)
        except KeyboardInterrupt:
            console.print("stopping")
            return 0
        finally:
            # A second Ctrl-C must not leave half of the parts running.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            supervisor.stop()
            console.print("all parts stopped")


def _start(
    settings: Settings,
    supervisor: Supervisor,
    console: Console,
    *,
    config: Path,
    options: Sequence[str],
) -> None:
    """Start broker, registry and engine, and the other parts once broker and registry answer.

    The engine takes longest, so the others do not wait for it before they start.
    """
    parts = {part.name: part for part in _parts(settings, config=config, options=options)}
    for name in ("broker", "registry"):
        if name not in parts:
            console.print(f"  {name:<9} external")

    def report(part: Part, seconds: float) -> None:
        console.print(f"  {part.name:<9} ready after {seconds:5.1f} s   {part.address}")

    console.print(f"onlinerl up: policy {settings.policy.name}, data in {settings.data_dir}")
    services = [supervisor.start(parts[name]) for name in ("broker", "registry") if name in parts]
    engine = supervisor.start(parts["engine"])
    supervisor.wait_until_healthy(services, on_healthy=report)
    others = [supervisor.start(parts[name]) for name in _PARTS_AFTER_SERVICES]
    supervisor.wait_until_healthy([engine, *others], on_healthy=report)


def _parts(settings: Settings, *, config: Path, options: Sequence[str]) -> Iterator[Part]:
    healthy = service_checks(settings)
    if settings.broker.embedded:
        yield Part(
            name="broker",
            command=tansu_command(*parse_address(settings.broker.bootstrap)),
            healthy=healthy["broker"],
            address=f"{settings.broker.bootstrap}  (Kafka protocol, log in memory only)",
        )
    if settings.registry.embedded:
        yield Part(
            name="registry",
            command=_mlflow_command(settings),
            healthy=healthy["registry"],
            address=f"{settings.registry.tracking_uri}  (MLflow)",
            start_timeout_s=180,
            # Its job runner and the workers triple the memory of the server, and nothing uses them.
            environment={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
    addresses = {
        "engine": f"http://{settings.engine.host}:{settings.engine.port}  (vLLM)",
        "gateway": f"{gateway_url(settings)}/v1  (OpenAI clients)",
        "ingest": f"tables in {settings.store_root}",
        "deploy": f"weights in {settings.weights_root}",
        "maintain": f"upkeep every {settings.maintenance.interval_s:.0f} s",
        "schedule": f"a cycle every {settings.schedule.interval_s:.0f} s",
    }
    for name, address in addresses.items():
        yield Part(
            name=name,
            command=[sys.executable, "-m", "onlinerl.cli", name, "--config", str(config), *options],
            healthy=healthy[name],
            address=address,
            # The engine loads and perhaps compiles the model, and the gateway waits for it.
            start_timeout_s=900,
            stop_timeout_s=settings.engine.stop_timeout_s + 10 if name == "engine" else 30,
        )


def _mlflow_command(settings: Settings) -> list[str]:
    host, port = parse_address(settings.registry.tracking_uri)
    folder = settings.folder("registry")
    folder.mkdir(parents=True, exist_ok=True)
    return [
        sys.executable, "-m", "mlflow", "server",
        "--host", host, "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip


def _summary(settings: Settings) -> str:
    gateway, registry = gateway_url(settings), redact_credentials(settings.registry.tracking_uri)
    return (
        "the stack is up\n"
        f"  clients       base_url = {gateway}/v1\n"
        f"  feedback      POST {gateway}/v1/feedback\n"
        f"  versions      {registry}/#/models/{settings.policy.name}\n"
        f"  logs          {settings.folder('logs')}\n"
        "  Ctrl-C stops everything"
    )


def _refuse_wrong_configuration(findings: Sequence[Finding]) -> None:
    """Raise a ConfigError that lists all wrong findings; log the notes when there are none."""
    problems = [f"{item.subject}: {item.message}" for item in findings if item.status == "wrong"]
    if problems:
        raise ConfigError("nothing was started:\n  " + "\n  ".join(problems))
    for finding in findings:
        if finding.status == "note":
            logger.warning("%s: %s", finding.subject, finding.message)


@contextmanager
def _lock_data_dir(data_dir: Path) -> Iterator[None]:
    """Hold a lock on data_dir, since two stacks would overwrite each other's tables and weights."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"data_dir {data_dir} cannot be created: {error.strerror}") from error
    try:
        lock = (data_dir / "up.lock").open("w")
    except OSError as error:
        raise ConfigError(f"data_dir {data_dir} cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LeaseHeld(f"another `onlinerl up` runs on {data_dir}; stop it first") from error
        yield


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and on SIGINT.

    SIGINT is set too, because a shell starts background jobs with SIGINT ignored.
    """

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
