"""The sub-commands of the tables: snapshots, maintenance, erasure and what else the store can do.

Each group of commands is one function that adds its parsers and one handler per command; a handler
imports what it calls, so that `--help` stays quick.
"""

import argparse
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from onlinerl.settings import Settings

Handler = Callable[[argparse.Namespace], int]


class AddCommand(Protocol):
    """What `cli` passes in: adds a command with the shared options and returns its parser."""

    def __call__(self, name: str, handler: Handler, summary: str) -> argparse.ArgumentParser:
        """A command of that name."""
        ...


def add_store_commands(add: AddCommand) -> None:
    """Every command that works on the tables."""
    _add_upkeep(add)
    _add_governance(add)
    _add_export(add)
    _add_dead_letters(add)


def _add_upkeep(add: AddCommand) -> None:
    snapshot = add("snapshot", _snapshot, "hold the rows of now under a name, list, or let go")
    snapshot.add_argument("action", choices=("create", "list", "drop"))
    snapshot.add_argument("name", nargs="?", metavar="NAME")
    snapshot.add_argument("--reason", default="asked by an operator", help="for the audit table")
    _add_actor(snapshot)
    maintain = add("maintain", _maintain, "compact, clean and vacuum the tables, again and again")
    maintain.add_argument("--once", action="store_true", help="stop after one pass")


def _add_governance(add: AddCommand) -> None:
    erase = add("erase", _erase, "forget a person, and prove it")
    erase.add_argument("--user", required=True, metavar="U", help="as the product names them")
    erase.add_argument("--tenant", metavar="T", help="only there; everywhere when absent")
    erase.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    erase.add_argument("--format", choices=("table", "json"), default="table")
    _add_actor(erase)
    lineage = add("lineage", _lineage, "which versions learned from what, both ways")
    about = lineage.add_mutually_exclusive_group(required=True)
    about.add_argument("--user", metavar="U", help="versions that learned from this person")
    about.add_argument("--version", type=int, metavar="V", help="what this version learned from")
    about.add_argument("--interaction", metavar="I", help="versions that learned from this one")
    lineage.add_argument("--tenant", metavar="T", help="of the user; every tenant when absent")
    lineage.add_argument("--format", choices=("table", "json"), default="table")
    _add_actor(lineage)


def _add_export(add: AddCommand) -> None:
    export = add("export", _export, "write consented rows in a format that others read")
    export.add_argument(
        "--format",
        required=True,
        choices=("chat", "trl-sft", "trl-kto", "trl-dpo", "verl", "tokens"),
    )
    export.add_argument("--out", required=True, type=Path, metavar="DIR", help="an empty folder")
    export.add_argument(
        "--layout",
        choices=("jsonl", "dataset"),
        default="jsonl",
        help="one file of lines, or a folder for Hugging Face datasets",
    )
    export.add_argument("--since", type=_time, metavar="TIME", help="served at or after, ISO 8601")
    export.add_argument("--until", type=_time, metavar="TIME", help="served before, ISO 8601")
    export.add_argument("--policy", metavar="P", help="one policy; all when absent")
    export.add_argument("--snapshot", metavar="NAME", help="read what this snapshot holds")
    export.add_argument("--tokenizer", default="", metavar="PATH", help="[policy].base_model")
    export.add_argument(
        "--include-log",
        action="store_true",
        help="also rows that may be kept and not learned from; chat only",
    )
    _add_actor(export)


def _add_dead_letters(add: AddCommand) -> None:
    letters = add("dead-letters", _dead_letters, "list records that broke the contract, or retry")
    letters.add_argument("action", choices=("list", "replay"))
    letters.add_argument("--reason", metavar="R", help="the reason begins so, e.g. spans")
    letters.add_argument("--topic", metavar="T", help="of this topic alone")
    letters.add_argument("--since", type=_time, metavar="TIME", help="stored at or after, ISO 8601")
    letters.add_argument("--id", metavar="ID", help="one letter, by the first digits of its id")
    letters.add_argument("--all", action="store_true", help="also replayed ones, or replay all")
    letters.add_argument("--limit", type=int, default=50, metavar="N", help="list the newest N")
    letters.add_argument("--dry-run", action="store_true", help="say how many; send nothing")
    letters.add_argument("--format", choices=("table", "json"), default="table")
    _add_actor(letters)


def _time(text: str) -> datetime:
    """An instant; without an offset it is UTC."""
    at = datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _add_actor(command: argparse.ArgumentParser) -> None:
    actor = os.environ.get("USER") or "operator"
    command.add_argument("--actor", default=actor, help="who asks, for the audit table")


def _snapshot(arguments: argparse.Namespace) -> int:
    from onlinerl.rollout_store.snapshots.command import run_snapshot

    return run_snapshot(
        _settings(arguments),
        action=arguments.action,
        name=arguments.name,
        actor=arguments.actor,
        reason=arguments.reason,
    )


def _maintain(arguments: argparse.Namespace) -> int:
    from onlinerl.rollout_store.upkeep.process import run_maintain

    return run_maintain(_settings(arguments), once=arguments.once)


def _erase(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.erase import run_erase

    return run_erase(
        _settings(arguments),
        user=arguments.user,
        tenant=arguments.tenant,
        dry_run=arguments.dry_run,
        actor=arguments.actor,
        format=arguments.format,
    )


def _lineage(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.lineage import run_lineage

    return run_lineage(
        _settings(arguments),
        user=arguments.user,
        tenant=arguments.tenant,
        version=arguments.version,
        interaction=arguments.interaction,
        actor=arguments.actor,
        format=arguments.format,
    )


def _export(arguments: argparse.Namespace) -> int:
    from onlinerl.rollout_store.export.command import ExportRequest, run_export

    fields = ("format", "out", "layout", "since", "until", "policy", "snapshot", "tokenizer")
    request = ExportRequest(
        **{name: getattr(arguments, name) for name in fields}, include_log=arguments.include_log
    )
    return run_export(_settings(arguments), request, actor=arguments.actor)


def _dead_letters(arguments: argparse.Namespace) -> int:
    from onlinerl.ingest.dead_letters.command import run_list, run_replay
    from onlinerl.ingest.dead_letters.replay import Selection
    from onlinerl.rollout_store.tables.delta_store import DeltaStore

    is_list = arguments.action == "list"
    selection = Selection(
        reason=arguments.reason,
        topic=arguments.topic,
        since=arguments.since,
        digest=arguments.id,
        with_replayed=is_list and arguments.all,
    )
    settings = _settings(arguments)
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    if is_list:
        return run_list(store, selection, limit=arguments.limit, format=arguments.format)
    return run_replay(
        store,
        selection,
        broker=settings.broker,
        everything=arguments.all,
        dry_run=arguments.dry_run,
        actor=arguments.actor,
    )


def _settings(arguments: argparse.Namespace) -> "Settings":
    from onlinerl.settings import load

    return load(arguments.config, arguments.set)
