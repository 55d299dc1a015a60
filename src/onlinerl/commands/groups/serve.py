"""`up`, `doctor`, `gateway`, `engine` and `ingest`: the parts that serve and log requests."""

import argparse

from onlinerl.commands.arguments import Commands, load_settings


def add_commands(commands: Commands) -> None:
    """Add every command of this group."""
    commands.add("up", _up, "start the one-machine stack and keep it running until Ctrl-C")
    commands.add("doctor", _doctor, "check a configuration and the parts that it names")
    commands.add("gateway", _gateway, "serve OpenAI and Anthropic clients and log every token")
    commands.add("engine", _engine, "run one vLLM replica with the weight transfer plugin")
    ingest = commands.add("ingest", _ingest, "move events from Kafka into the tables, exactly once")
    ingest.add_argument("--once", action="store_true", help="stop at the end of the topics")


def _up(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.up import run_up

    options = ["--log-level", arguments.log_level]
    for override in arguments.set:
        options += ["--set", override]
    return run_up(load_settings(arguments), config=arguments.config, options=options)


def _doctor(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.doctor import run_doctor

    return run_doctor(load_settings(arguments))


def _gateway(arguments: argparse.Namespace) -> int:
    from onlinerl.serving.main import run_gateway

    return run_gateway(load_settings(arguments))


def _engine(arguments: argparse.Namespace) -> int:
    from onlinerl.serving.engine.command import run_engine

    return run_engine(load_settings(arguments))


def _ingest(arguments: argparse.Namespace) -> int:
    from onlinerl.ingest.main import run_ingest

    return run_ingest(load_settings(arguments), once=arguments.once)
