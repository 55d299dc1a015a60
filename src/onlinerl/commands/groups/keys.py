"""`onlinerl keys add | list | revoke | new`."""

import argparse

from onlinerl.commands.arguments import Commands, load_settings

CONSENTS = ("none", "log", "train")


def add_commands(commands: Commands) -> None:
    """Add `keys` and its actions."""
    keys = commands.add_group("keys", "admit, list and revoke API keys")
    _add_add(keys)
    keys.add("list", _list, "show the keys that are known, without the keys")
    revoke = keys.add("revoke", _revoke, "take a key back; it is refused in seconds")
    revoke.add_argument("name")
    new = keys.add_without_config("new", _new, "print a new key and the TOML that admits it")
    _add_terms(new)


def _add_add(keys: Commands) -> None:
    add = keys.add("add", _add, "admit a new key; it is shown once")
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
