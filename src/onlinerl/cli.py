"""The command line: parse, read the configuration, then import and call one part.

Nothing heavy is imported before the command is known, so `--help` and a typing error are quick.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl import __version__
from onlinerl.commands.keys_arguments import add_keys_commands
from onlinerl.commands.store_arguments import add_store_commands
from onlinerl.errors import DependencyMissing, OnlineRLError
from onlinerl.process import logs

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = Path("onlinerl.toml")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it did its work, 1 with a message when it could not, 2 for usage."""
    arguments = _parser().parse_args(argv)
    _refuse_telemetry()
    _keep_others_out()
    logs.configure(arguments.log_level)
    try:
        return int(arguments.handler(arguments))
    except OnlineRLError as error:
        sys.stderr.write(f"onlinerl {arguments.command}: {error}\n")
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("onlinerl"):
            raise
        missing = DependencyMissing(
            f"the package {error.name} is not installed; `onlinerl {arguments.command}` needs "
            "an extra of onlinerl: pip install 'onlinerl[all]'"
        )
        sys.stderr.write(f"onlinerl {arguments.command}: {missing}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads the output has seen enough
        logger.debug("failed", exc_info=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        logger.debug("failed", exc_info=True)
        sys.stderr.write(f"onlinerl {arguments.command}: {error}\n")
        return 1


def _refuse_telemetry() -> None:
    """MLflow and vLLM report usage to their makers unless told not to; an operator may overrule."""
    for variable in ("DO_NOT_TRACK", "VLLM_NO_USAGE_STATS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def _keep_others_out() -> None:
    """What users said lies in files of several parts; who is neither owner nor group reads none."""
    os.umask(os.umask(0o077) | 0o007)


def _settings(arguments: argparse.Namespace) -> "Settings":
    from onlinerl.settings import load

    return load(arguments.config, arguments.set)


def _up(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.up import run_up

    options = ["--log-level", arguments.log_level]
    for override in arguments.set:
        options += ["--set", override]
    return run_up(_settings(arguments), config=arguments.config, options=options)


def _doctor(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.doctor import run_doctor

    return run_doctor(_settings(arguments))


def _gateway(arguments: argparse.Namespace) -> int:
    from onlinerl.serving.main import run_gateway

    return run_gateway(_settings(arguments))


def _engine(arguments: argparse.Namespace) -> int:
    from onlinerl.serving.engine.command import run_engine

    return run_engine(_settings(arguments))


def _ingest(arguments: argparse.Namespace) -> int:
    from onlinerl.ingest.main import run_ingest

    return run_ingest(_settings(arguments), once=arguments.once)


def _train(arguments: argparse.Namespace) -> int:
    from onlinerl.trainer.main import run_train

    return run_train(_settings(arguments), snapshot=arguments.snapshot)


def _schedule(arguments: argparse.Namespace) -> int:
    from onlinerl.trainer.main import run_schedule

    return run_schedule(_settings(arguments))


def _deploy(arguments: argparse.Namespace) -> int:
    from onlinerl.deploy.main import run_deploy

    return run_deploy(_settings(arguments))


def _promote(arguments: argparse.Namespace) -> int:
    from onlinerl.deploy.main import run_promote

    return run_promote(_settings(arguments), version=arguments.version, actor=arguments.actor)


def _rollback(arguments: argparse.Namespace) -> int:
    from onlinerl.deploy.main import run_rollback

    return run_rollback(
        _settings(arguments),
        version=arguments.version,
        actor=arguments.actor,
        reason=arguments.reason,
    )


def _status(arguments: argparse.Namespace) -> int:
    from onlinerl.deploy.main import run_status

    return run_status(_settings(arguments))


def _query(arguments: argparse.Namespace) -> int:
    from onlinerl.rollout_store.query.command import run_query
    from onlinerl.rollout_store.tables.delta_store import DeltaStore

    settings = _settings(arguments)
    return run_query(
        DeltaStore(settings.store_root, settings.store.storage_options),
        sql=arguments.sql,
        format=arguments.format,
        snapshot=arguments.snapshot,
        rewards=settings.rewards,
        limits=settings.store,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onlinerl",
        description="A deployed LLM product becomes its own teacher: capture, learn, gate, swap.",
    )
    parser.add_argument("--version", action="version", version=f"onlinerl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = _shared_options()
    add = _Commands(commands, shared)
    add("up", _up, "start the one-machine stack and keep it running until Ctrl-C")
    add("doctor", _doctor, "check a configuration and the parts it names, one line each")
    add("gateway", _gateway, "serve OpenAI and Anthropic clients and log every token")
    add("engine", _engine, "run one vLLM replica with the weight transfer plugin")
    ingest = add("ingest", _ingest, "move events from Kafka into the tables, exactly once")
    ingest.add_argument("--once", action="store_true", help="stop at the end of the topics")
    train = add("train", _train, "run one cycle now: window, update, candidate")
    train.add_argument(
        "--snapshot", metavar="NAME", help="choose the window from the rows that it holds"
    )
    add("schedule", _schedule, "run cycles when they are due")
    add("deploy", _deploy, "watch the registry: gate, promote, verify")
    _add_release_commands(add)
    query = add("query", _query, "run SQL on the tables and views")
    query.add_argument("sql", metavar="SQL")
    query.add_argument("--format", choices=("table", "json", "csv", "parquet"), default="table")
    query.add_argument("--snapshot", metavar="NAME", help="read the rows that it holds")
    add_store_commands(add)
    add_keys_commands(commands, shared)
    return parser


class _Commands:
    """Adds subcommands that share `--config`, `--set` and `--log-level`."""

    def __init__(
        self,
        commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
        shared: argparse.ArgumentParser,
    ) -> None:
        self._commands = commands
        self._shared = shared

    def __call__(
        self, name: str, handler: Callable[[argparse.Namespace], int], summary: str
    ) -> argparse.ArgumentParser:
        command = self._commands.add_parser(
            name, help=summary, description=summary, parents=[self._shared]
        )
        command.set_defaults(handler=handler)
        return command


def _shared_options() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, help=f"TOML file ({DEFAULT_CONFIG})"
    )
    shared.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one value of the file; may be repeated",
    )
    shared.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    return shared


def _add_release_commands(add: _Commands) -> None:
    actor = os.environ.get("USER") or "operator"
    promote = add("promote", _promote, "approve a version and wait until it serves")
    promote.add_argument("version", type=int, nargs="?", help="the candidate when absent")
    promote.add_argument("--actor", default=actor, help="who approves, for the audit table")
    rollback = add("rollback", _rollback, "make an earlier version champion again")
    rollback.add_argument("version", type=int, nargs="?", help="the previous champion when absent")
    rollback.add_argument("--actor", default=actor, help="who asks, for the audit table")
    rollback.add_argument("--reason", default="asked by an operator", help="for the audit table")
    add("status", _status, "show versions, gates and replicas")


if __name__ == "__main__":
    sys.exit(main())
