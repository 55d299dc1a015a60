"""What the parsers of all commands share: the common options, and how a command is added.

Imports nothing heavy, so that `onlinerl --help` stays quick.
"""

import argparse
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onlinerl.settings import Settings

Handler = Callable[[argparse.Namespace], int]
"""Runs one command and returns its exit code."""

DEFAULT_CONFIG = Path("onlinerl.toml")
DEFAULT_LOG_LEVEL = "info"


class Commands:
    """Adds the commands of one level of the command line, e.g. those after `onlinerl keys`.

    Args:
        parser: The parser that the commands belong to.
        dest: Name of the parsed value that holds the command's name.
        metavar: What the help text calls a command.
    """

    def __init__(self, parser: argparse.ArgumentParser, *, dest: str, metavar: str) -> None:
        self._subparsers = parser.add_subparsers(dest=dest, required=True, metavar=metavar)
        self._common = _common_options()

    def add(self, name: str, handler: Handler, summary: str) -> argparse.ArgumentParser:
        """Add a command that takes `--config`, `--set` and `--log-level`; returns its parser."""
        command: argparse.ArgumentParser = self._subparsers.add_parser(
            name, help=summary, description=summary, parents=[self._common]
        )
        command.set_defaults(handler=handler)
        return command

    def add_without_config(
        self, name: str, handler: Handler, summary: str
    ) -> argparse.ArgumentParser:
        """Add a command that reads no configuration; returns its parser."""
        command: argparse.ArgumentParser = self._subparsers.add_parser(
            name, help=summary, description=summary
        )
        command.set_defaults(handler=handler, log_level=DEFAULT_LOG_LEVEL)
        return command

    def add_group(self, name: str, summary: str) -> "Commands":
        """Add a command that has commands of its own; returns those."""
        group = self._subparsers.add_parser(name, help=summary, description=summary)
        return Commands(group, dest="action", metavar="ACTION")


def add_actor_option(
    command: argparse.ArgumentParser, *, meaning: str = "who asks, for the audit table"
) -> None:
    """Add `--actor`, by default the user of the operating system."""
    actor = os.environ.get("USER") or "operator"
    command.add_argument("--actor", default=actor, help=meaning)


def add_reason_option(command: argparse.ArgumentParser) -> None:
    """Add `--reason`, which the audit table keeps."""
    command.add_argument("--reason", default="asked by an operator", help="for the audit table")


def parse_time(text: str) -> datetime:
    """Parse ISO 8601; a time without an offset is UTC."""
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def load_settings(arguments: argparse.Namespace) -> "Settings":
    """Read the configuration that `--config` and `--set` name.

    Raises:
        ConfigError: the configuration is wrong.
    """
    from onlinerl.settings import load

    return load(arguments.config, arguments.set)


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, help=f"TOML file ({DEFAULT_CONFIG})"
    )
    common.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one value of the file; may be repeated",
    )
    common.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default=DEFAULT_LOG_LEVEL
    )
    return common
