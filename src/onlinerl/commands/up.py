"""`onlinerl up`: every part on one machine, from one configuration, until Ctrl-C.

The parts are the same processes that run alone in production; this file says which there are,
in which order they start and when each is healthy.
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
from typing import TYPE_CHECKING

from rich.console import Console

from onlinerl.commands.checks import (
    Finding,
    address_of,
    gateway_url,
    port_findings,
    service_checks,
    static_findings,
    without_password,
)
from onlinerl.commands.embedded_broker import tansu_command
from onlinerl.errors import ConfigError, LeaseHeld
from onlinerl.process.supervisor import Part, Supervisor

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
_REST = ("ingest", "deploy", "gateway", "schedule", "maintain")
"""Parts that start when the services answer."""


def run_up(settings: "Settings", *, config: Path, options: Sequence[str]) -> int:
    """Start all parts, print where each is, keep them running; 0 after Ctrl-C or SIGTERM.

    Args:
        settings: The configuration.
        config: Its file.
        options: What each part is given on its command line beside the file.

    Raises:
        ConfigError: naming all that is wrong, before anything was started.
        LeaseHeld: when another `onlinerl up` runs on the same data_dir.
        ServiceUnavailable: when a part does not become healthy or dies too often; all are stopped.
    """
    console = Console(soft_wrap=True)
    with _only_one(settings.data_dir), _stop_signals():
        _refuse_what_is_wrong([*static_findings(settings), *port_findings(settings)])
        supervisor = Supervisor(log_dir=settings.folder("logs"))
        try:
            _start(settings, supervisor, console, config=config, options=options)
            console.print(_where_to_look(settings))
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
    settings: "Settings",
    supervisor: Supervisor,
    console: Console,
    *,
    config: Path,
    options: Sequence[str],
) -> None:
    """The engine starts first, since it takes longest; what needs the registry waits for it."""
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
    rest = [supervisor.start(parts[n]) for n in _REST]
    supervisor.wait_until_healthy([engine, *rest], on_healthy=report)


def _parts(settings: "Settings", *, config: Path, options: Sequence[str]) -> Iterator[Part]:
    healthy = service_checks(settings)
    if settings.broker.embedded:
        yield Part(
            name="broker",
            command=tansu_command(*address_of(settings.broker.bootstrap)),
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
            # The job runner and its workers triple the server's memory; nothing here uses them.
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
            # The engine loads and perhaps compiles the model; the gateway waits for the engine.
            start_timeout_s=900,
            stop_timeout_s=settings.engine.stop_timeout_s + 10 if name == "engine" else 30,
        )


def _mlflow_command(settings: "Settings") -> list[str]:
    host, port = address_of(settings.registry.tracking_uri)
    folder = settings.folder("registry")
    folder.mkdir(parents=True, exist_ok=True)
    return [
        sys.executable, "-m", "mlflow", "server",
        "--host", host, "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip


def _where_to_look(settings: "Settings") -> str:
    gateway, registry = gateway_url(settings), without_password(settings.registry.tracking_uri)
    return (
        "the stack is up\n"
        f"  clients       base_url = {gateway}/v1\n"
        f"  feedback      POST {gateway}/v1/feedback\n"
        f"  versions      {registry}/#/models/{settings.policy.name}\n"
        f"  logs          {settings.folder('logs')}\n"
        "  Ctrl-C stops everything"
    )


def _refuse_what_is_wrong(findings: Sequence[Finding]) -> None:
    wrong = [f"{item.subject}: {item.message}" for item in findings if item.status == "wrong"]
    if wrong:
        raise ConfigError("nothing was started:\n  " + "\n  ".join(wrong))
    for finding in findings:
        if finding.status == "note":
            logger.warning("%s: %s", finding.subject, finding.message)


@contextmanager
def _only_one(data_dir: Path) -> Iterator[None]:
    """Two stacks on one data_dir would write each other's tables and weights."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"data_dir {data_dir} cannot be made: {error.strerror}") from error
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
def _stop_signals() -> Iterator[None]:
    """SIGTERM ends the stack as Ctrl-C does, and Ctrl-C does so also when a shell ignored it."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
