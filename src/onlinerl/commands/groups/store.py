"""The commands that work on the tables, from `query` to `dead-letters`."""

import argparse
from pathlib import Path

from onlinerl.commands.arguments import (
    Commands,
    add_actor_option,
    add_reason_option,
    load_settings,
    parse_time,
)


def add_commands(commands: Commands) -> None:
    """Add every command of this group."""
    _add_query(commands)
    _add_upkeep(commands)
    _add_governance(commands)
    _add_export(commands)
    _add_dead_letters(commands)


def _add_query(commands: Commands) -> None:
    query = commands.add("query", _query, "run SQL on the tables and views")
    query.add_argument("sql", metavar="SQL")
    query.add_argument("--format", choices=("table", "json", "csv", "parquet"), default="table")
    query.add_argument("--snapshot", metavar="NAME", help="read the rows of this snapshot")


def _add_upkeep(commands: Commands) -> None:
    snapshot = commands.add(
        "snapshot", _snapshot, "hold the current rows under a name, list what is held, or drop it"
    )
    snapshot.add_argument("action", choices=("create", "list", "drop"))
    snapshot.add_argument("name", nargs="?", metavar="NAME")
    add_reason_option(snapshot)
    add_actor_option(snapshot)
    maintain = commands.add(
        "maintain", _maintain, "compact and clean the tables and apply retention, at intervals"
    )
    maintain.add_argument("--once", action="store_true", help="stop after one pass")


def _add_governance(commands: Commands) -> None:
    erase = commands.add("erase", _erase, "delete a person's data everywhere, and prove it")
    erase.add_argument(
        "--user", required=True, metavar="U", help="the id that the product sends for the person"
    )
    erase.add_argument(
        "--tenant", metavar="T", help="in this tenant only; in every tenant when absent"
    )
    erase.add_argument(
        "--dry-run", action="store_true", help="print what would be deleted; change nothing"
    )
    erase.add_argument("--format", choices=("table", "json"), default="table")
    add_actor_option(erase)
    lineage = commands.add(
        "lineage", _lineage, "list the rows that a version learned from, or the versions of a row"
    )
    about = lineage.add_mutually_exclusive_group(required=True)
    about.add_argument("--user", metavar="U", help="versions that learned from this person")
    about.add_argument(
        "--version", type=int, metavar="V", help="rows that this version learned from"
    )
    about.add_argument("--interaction", metavar="I", help="versions that learned from this row")
    lineage.add_argument(
        "--tenant", metavar="T", help="tenant of the user; every tenant when absent"
    )
    lineage.add_argument("--format", choices=("table", "json"), default="table")
    add_actor_option(lineage)


def _add_export(commands: Commands) -> None:
    export = commands.add(
        "export", _export, "write consented rows in a format that other tools read"
    )
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
    export.add_argument(
        "--since", type=parse_time, metavar="TIME", help="served at or after, ISO 8601"
    )
    export.add_argument("--until", type=parse_time, metavar="TIME", help="served before, ISO 8601")
    export.add_argument("--policy", metavar="P", help="one policy; all when absent")
    export.add_argument("--snapshot", metavar="NAME", help="read the rows of this snapshot")
    export.add_argument(
        "--tokenizer",
        default="",
        metavar="PATH",
        help="folder or id; [policy].base_model when absent",
    )
    export.add_argument(
        "--include-log",
        action="store_true",
        help="also rows whose consent is log, not train; chat only",
    )
    add_actor_option(export)


def _add_dead_letters(commands: Commands) -> None:
    letters = commands.add(
        "dead-letters", _dead_letters, "list records that ingest refused, or replay them"
    )
    letters.add_argument("action", choices=("list", "replay"))
    letters.add_argument("--reason", metavar="R", help="only reasons that start with R, e.g. spans")
    letters.add_argument("--topic", metavar="T", help="only this topic")
    letters.add_argument(
        "--since", type=parse_time, metavar="TIME", help="stored at or after, ISO 8601"
    )
    letters.add_argument(
        "--id", metavar="ID", help="one dead letter, by the first digits of its id"
    )
    letters.add_argument(
        "--all", action="store_true", help="list also replayed ones, or replay all"
    )
    letters.add_argument("--limit", type=int, default=50, metavar="N", help="list the newest N")
    letters.add_argument("--dry-run", action="store_true", help="print how many; send nothing")
    letters.add_argument("--format", choices=("table", "json"), default="table")
    add_actor_option(letters)


def _query(arguments: argparse.Namespace) -> int:
    from onlinerl.rollout_store.query.command import run_query

    return run_query(
        load_settings(arguments),
        sql=arguments.sql,
        format=arguments.format,
        snapshot=arguments.snapshot,
    )


def _snapshot(arguments: argparse.Namespace) -> int:
    from onlinerl.rollout_store.snapshots.command import run_snapshot

    return run_snapshot(
        load_settings(arguments),
        action=arguments.action,
        name=arguments.name,
        actor=arguments.actor,
        reason=arguments.reason,
    )


def _maintain(arguments: argparse.Namespace) -> int:
    from onlinerl.rollout_store.upkeep.process import run_maintain

    return run_maintain(load_settings(arguments), once=arguments.once)


def _erase(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.erase import run_erase

    return run_erase(
        load_settings(arguments),
        user=arguments.user,
        tenant=arguments.tenant,
        dry_run=arguments.dry_run,
        actor=arguments.actor,
        format=arguments.format,
    )


def _lineage(arguments: argparse.Namespace) -> int:
    from onlinerl.commands.lineage import run_lineage

    return run_lineage(
        load_settings(arguments),
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
    return run_export(load_settings(arguments), request, actor=arguments.actor)


def _dead_letters(arguments: argparse.Namespace) -> int:
    from onlinerl.ingest.dead_letters.command import run_list, run_replay
    from onlinerl.ingest.dead_letters.letters import Selection

    is_list = arguments.action == "list"
    selection = Selection(
        reason=arguments.reason,
        topic=arguments.topic,
        since=arguments.since,
        letter_id=arguments.id,
        with_replayed=is_list and arguments.all,
    )
    settings = load_settings(arguments)
    if is_list:
        return run_list(settings, selection, limit=arguments.limit, format=arguments.format)
    return run_replay(
        settings,
        selection,
        everything=arguments.all,
        dry_run=arguments.dry_run,
        actor=arguments.actor,
    )
