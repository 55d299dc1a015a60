"""`onlinerl keys add | list | revoke | new`."""

import argparse

from onlinerl.commands.arguments import Commands, load_settings

CONSENTS = ("none", "log", "train")


def add_commands(commands: Commands) -> None:
    """Add `keys` and its actions."""
    keys = commands.add_group("keys", "add, list and revoke API keys")
    _add_add(keys)
    keys.add("list", _list, "list all keys by name; the keys themselves are not stored")
    revoke = keys.add("revoke", _revoke, "revoke a key; the gateway refuses it within seconds")
    revoke.add_argument("name")
    new = keys.add_without_config("new", _new, "print a new key and the TOML that admits it")
    _add_terms(new)


def _add_add(keys: Commands) -> None:
    add = keys.add("add", _add, "add a new key and print it, once")
    _add_terms(add)
    add.add_argument(
        "--policy", action="append", default=[], help="allow this policy only; may be repeated"
    )
    add.add_argument("--max-in-flight", type=int, help="requests at the same time")
    add.add_argument("--requests-per-minute", type=int)
    add.add_argument("--tokens-per-minute", type=int, help="prompt and completion together")


def _add_terms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the key in logs and metrics")
    parser.add_argument("--tenant", default="default")
    parser.add_argument("--consent", choices=CONSENTS, default="log")


def _add(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.keys import key_limits, run_keys_add

    return run_keys_add(
        load_settings(arguments),
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

    return run_keys_list(load_settings(arguments))


def _revoke(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.keys import run_keys_revoke

    return run_keys_revoke(load_settings(arguments), name=arguments.name)


def _new(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.keys import run_keys_new

    return run_keys_new(name=arguments.name, tenant=arguments.tenant, consent=arguments.consent)
