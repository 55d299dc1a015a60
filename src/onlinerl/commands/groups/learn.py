"""`train` and `schedule`: run cycles of learning, now or when they are due."""

import argparse

from onlinerl.commands.arguments import Commands, load_settings


def add_commands(commands: Commands) -> None:
    """Add every command of this group."""
    train = commands.add("train", _train, "run one cycle now: window, update, candidate")
    train.add_argument(
        "--snapshot", metavar="NAME", help="choose the window from the rows of this snapshot"
    )
    commands.add("schedule", _schedule, "run cycles when they are due")


def _train(arguments: argparse.Namespace) -> int:
    from onlinerl.trainer.main import run_train

    return run_train(load_settings(arguments), snapshot=arguments.snapshot)


def _schedule(arguments: argparse.Namespace) -> int:
    from onlinerl.trainer.main import run_schedule

    return run_schedule(load_settings(arguments))
