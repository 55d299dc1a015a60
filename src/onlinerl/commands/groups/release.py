"""`deploy`, `promote`, `rollback` and `status`: decide which version serves."""

import argparse

from onlinerl.commands.arguments import (
    Commands,
    add_actor_option,
    add_reason_option,
    load_settings,
)


def add_commands(commands: Commands) -> None:
    """Add every command of this group."""
    commands.add("deploy", _deploy, "run the controller that judges, promotes and proves versions")
    promote = commands.add("promote", _promote, "approve a version and wait until it serves")
    promote.add_argument("version", type=int, nargs="?", help="the candidate when absent")
    add_actor_option(promote, meaning="who approves, for the audit table")
    rollback = commands.add("rollback", _rollback, "make an earlier version champion again")
    rollback.add_argument("version", type=int, nargs="?", help="the previous champion when absent")
    add_actor_option(rollback)
    add_reason_option(rollback)
    commands.add("status", _status, "show versions, gates and replicas")


def _deploy(arguments: argparse.Namespace) -> int:
    from onlinerl.deploy.main import run_deploy

    return run_deploy(load_settings(arguments))


def _promote(arguments: argparse.Namespace) -> int:
    from onlinerl.deploy.main import run_promote

    return run_promote(load_settings(arguments), version=arguments.version, actor=arguments.actor)


def _rollback(arguments: argparse.Namespace) -> int:
    from onlinerl.deploy.main import run_rollback

    return run_rollback(
        load_settings(arguments),
        version=arguments.version,
        actor=arguments.actor,
        reason=arguments.reason,
    )


def _status(arguments: argparse.Namespace) -> int:
    from onlinerl.deploy.main import run_status

    return run_status(load_settings(arguments))
