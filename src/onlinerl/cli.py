"""The command line: parses the arguments, runs one command, and turns errors into exit codes.

A command imports what it needs only when it runs, so `onlinerl --help` is quick.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from onlinerl import __version__
from onlinerl.commands.arguments import Commands
from onlinerl.commands.groups import keys, learn, release, serve, store
from onlinerl.errors import DependencyMissing, OnlineRLError
from onlinerl.process import logs

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 an error that was printed, 2 wrong usage, 130 an interrupt by Ctrl-C. Errors
    that nobody expected are raised and keep their traceback.
    """
    arguments = _parser().parse_args(argv)
    _disable_telemetry()
    _deny_other_users()
    logs.configure(arguments.log_level)
    try:
        return int(arguments.handler(arguments))
    except OnlineRLError as error:
        return _fail(arguments.command, error)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("onlinerl"):
            raise
        missing = DependencyMissing(
            f"the package {error.name} is not installed; `onlinerl {arguments.command}` needs "
            "an extra of onlinerl: pip install 'onlinerl[all]'"
        )
        return _fail(arguments.command, missing)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed the pipe. Python would flush
        # standard output once more at exit and fail, so it goes to /dev/null from here on.
        logger.debug("failed", exc_info=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        logger.debug("failed", exc_info=True)
        return _fail(arguments.command, error)


def _fail(command: str, error: Exception) -> int:
    sys.stderr.write(f"onlinerl {command}: {error}\n")
    return 1


def _disable_telemetry() -> None:
    """Keep MLflow and vLLM from reporting usage, unless the environment sets these variables."""
    for variable in ("DO_NOT_TRACK", "VLLM_NO_USAGE_STATS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")


def _deny_other_users() -> None:
    """Deny other users of the machine the files written from now on; many hold user content."""
    os.umask(os.umask(0o077) | 0o007)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onlinerl",
        description="A deployed LLM product becomes its own teacher: capture, learn, gate, swap.",
    )
    parser.add_argument("--version", action="version", version=f"onlinerl {__version__}")
    commands = Commands(parser, dest="command", metavar="COMMAND")
    for group in (serve, learn, release, store, keys):
        group.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
