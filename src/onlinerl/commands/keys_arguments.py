"""The sub-commands of `onlinerl keys`."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onlinerl.settings import Settings

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

CONSENTS = ("none", "log", "train")


def add_keys_commands(commands: "Commands", shared: argparse.ArgumentParser) -> None:
    """Add `keys add|list|revoke|new`.

    Args:
        commands: where `keys` is added.
        shared: the options that every command has.
    """
    keys = commands.add_parser("keys", help="admit, list and revoke API keys")
    actions = keys.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_add(actions, shared)
    _sub(actions, shared, "list", _list, "show the keys that are known, without the keys")
    revoke = _sub(actions, shared, "revoke", _revoke, "take a key back; it is refused in seconds")
    revoke.add_argument("name")
    new = actions.add_parser("new", help="print a new key and the TOML that admits it")
    _add_terms(new)
    new.set_defaults(handler=_new, log_level="info")


def _add_add(actions: "Commands", shared: argparse.ArgumentParser) -> None:
    add = _sub(actions, shared, "add", _add, "admit a new key; it is shown once")
    _add_terms(add)
    add.add_argument(
        "--policy", action="append", default=[], help="allow this policy only; may be repeated"
    )
    add.add_argument("--max-in-flight", type=int, help="requests answered at once")
    add.add_argument("--requests-per-minute", type=int)
    add.add_argument("--tokens-per-minute", type=int, help="prompt and completion together")


def _add_terms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="how logs and metrics call the key")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--consent", choices=CONSENTS, default="log")


def _sub(
    actions: "Commands",
    shared: argparse.ArgumentParser,
    name: str,
    handler: Callable[[argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=summary, parents=[shared]
    )
    parser.set_defaults(handler=handler)
    return parser


def _settings(arguments: argparse.Namespace) -> "Settings":
    from onlinerl.settings import load

    return load(arguments.config, arguments.set)


def _add(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.keys import key_limits, run_keys_add

    return run_keys_add(
        _settings(arguments),
        name=arguments.name,
        tenant=arguments.tenant,
        consent=arguments.consent,
        policies=arguments.policy,
        limits=key_limits(
            max_in_flight=arguments.max_in_flight,
            requests_per_minute=arguments.requests_per_minute,
            tokens_per_minute=arguments.tokens_per_minute,
        ),
    )


def _list(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.keys import run_keys_list

    return run_keys_list(_settings(arguments))


def _revoke(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.keys import run_keys_revoke

    return run_keys_revoke(_settings(arguments), name=arguments.name)


def _new(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.keys import run_keys_new

    return run_keys_new(name=arguments.name, tenant=arguments.tenant, consent=arguments.consent)
