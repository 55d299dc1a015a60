"""`onlinerl lineage`: which rows a version learned from, and which versions learned from a row.

The registry keeps the list of rows that each version learned from. Of erased rows the tables keep
digests of the ids, which are enough to count them in those lists.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from onlinerl.commands.tables import open_store
from onlinerl.commands.users import user_hashes
from onlinerl.deploy.registry.trained_rows import TrainedRows, descendants
from onlinerl.errors import ConfigError
from onlinerl.rollout_store.erasure.erased import TABLE as ERASED
from onlinerl.rollout_store.erasure.erased import digest
from onlinerl.rollout_store.query.command import existing_tables
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.settings import Settings

RowId = tuple[str, str]
"""Tenant and interaction id."""

RowFilter = Callable[[RowId], bool]

_MAX_PRINTED_ROWS = 1_000


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The answer to one question, in the form that is printed."""

    subject: str
    rows: Sequence[Mapping[str, object]]
    """One line per version, or one per row when the question was about a version."""
    summary: Mapping[str, object]
    audit_subject: str = ""
    """The subject for the table `audit`, which holds no ids of rows; `subject` when empty."""


def run_lineage(
    settings: Settings,
    *,
    user: str | None,
    tenant: str | None,
    version: int | None,
    interaction: str | None,
    actor: str,
    format: str,
) -> int:
    """Answer the question about a version, an interaction or a user, and record it in `audit`.

    Args:
        settings: The configuration.
        user: The id that the product sends for a person.
        tenant: Tenant of the user; None means every tenant.
        version: Number of a policy version.
        interaction: Id of an interaction.
        actor: Who asks, for the table `audit`.
        format: `table` or `json`.

    Raises:
        ConfigError: there are no tables, no such version, or no key to hash the user with.
        ServiceUnavailable: the registry or the tables do not answer.
    """
    store = open_store(settings)
    existing_tables(store)
    trained = open_trained_rows(settings)
    # An older release may not have made all tables that are read below. The tables and the registry
    # were asked first, because this writes.
    store.create()
    if version is not None:
        answer = version_lineage(store, trained, version)
    elif interaction is not None:
        answer = interaction_lineage(trained, interaction)
    else:
        users = user_hashes(settings, store, user=str(user), tenant=tenant)
        answer = user_lineage(store, trained, users)
    record_act(
        store,
        actor=actor,
        action="lineage",
        subject=answer.audit_subject or answer.subject,
        detail=answer.summary,
        at=datetime.now(UTC),
    )
    _print(answer, format=format)
    return 0


def open_trained_rows(settings: Settings) -> TrainedRows:
    """Connect to the registry of the configuration.

    Raises:
        ServiceUnavailable: the registry does not answer.
    """
    from onlinerl.deploy.registry.trained_rows import RegistryRows
    from onlinerl.registry.mlflow_registry import MlflowRegistry
    from onlinerl.registry.mlflow_server import MlflowServer

    registry = MlflowRegistry(
        MlflowServer(settings.registry.tracking_uri, timeout_s=settings.trainer.registry_timeout_s),
        policy=settings.policy.name,
        experiment=settings.registry.experiment,
    )
    registry.check()
    return RegistryRows(registry)


def version_lineage(store: DeltaStore, trained: TrainedRows, version: int) -> Lineage:
    """The rows that a version learned from.

    Raises:
        ConfigError: the registry has no such version.
    """
    if version not in [known.number for known in trained.versions()]:
        raise ConfigError(f"there is no version {version}; `onlinerl status` lists the versions")
    table = trained.rows(version)
    rows = [] if table is None else table.to_pylist()
    erased = _erased_digests(store)
    num_erased = sum(_digest(_row_id(row)) in erased for row in rows)
    return Lineage(
        subject=f"version {version}",
        rows=rows,
        summary={
            "version": version,
            "rows": len(rows),
            "interactions": len({_row_id(row) for row in rows}),
            "sessions": len({(row["tenant"], row.get("session_id")) for row in rows}),
            "rows_erased_since": num_erased,
        },
    )


def interaction_lineage(trained: TrainedRows, interaction: str) -> Lineage:
    """The versions that learned from an interaction, in any tenant."""
    answer = _lineage_of_rows(
        trained, subject=f"interaction {interaction}", is_asked=lambda row: row[1] == interaction
    )
    id_digest = digest("interaction", tenant="", name=interaction)
    return replace(answer, audit_subject=f"interaction {id_digest}")


def user_lineage(store: DeltaStore, trained: TrainedRows, users: Mapping[str, str]) -> Lineage:
    """The versions that learned from a person, whether the person was erased or not.

    Args:
        store: The tables with the person's rows, or with the digests of the erased ones.
        trained: The registry.
        users: Hash of the person by tenant.
    """
    present = _interactions_of(store, users)
    user_digests = {digest("user", tenant=tenant, name=user) for tenant, user in users.items()}
    erased = _erased_digests(store, users=user_digests)
    return _lineage_of_rows(
        trained,
        subject=f"user {' '.join(sorted(user_digests))}",
        is_asked=lambda row: row in present or _digest(row) in erased,
    )


def count_in_versions(trained: TrainedRows, is_asked: RowFilter) -> dict[int, int]:
    """Number of rows that pass the filter by version; versions without such rows are absent."""
    counts = {}
    for version in trained.versions():
        table = trained.rows(version.number)
        rows = [] if table is None else table.select(["tenant", "interaction_id"]).to_pylist()
        counts[version.number] = sum(is_asked(_row_id(row)) for row in rows)
    return {number: count for number, count in counts.items() if count}


def mark_versions(store: DeltaStore, trained: TrainedRows) -> dict[int, int]:
    """Tag every version with the number of its rows that any erasure has erased; returns those."""
    erased = _erased_digests(store)
    counts = count_in_versions(trained, lambda row: _digest(row) in erased)
    for number, count in counts.items():
        trained.mark(number, num_erased=count)
    return counts


def _lineage_of_rows(trained: TrainedRows, *, subject: str, is_asked: RowFilter) -> Lineage:
    counts = count_in_versions(trained, is_asked)
    inherited = descendants(trained.versions(), list(counts))
    rows: list[Mapping[str, object]] = [
        {"version": number, "rows": count, "how": "learned from them"}
        for number, count in counts.items()
    ]
    rows += [
        {"version": number, "rows": 0, "how": "trained from one that did"} for number in inherited
    ]
    return Lineage(
        subject=subject,
        rows=rows,
        summary={"versions": {str(k): v for k, v in counts.items()}, "inherited": inherited},
    )


def _interactions_of(store: DeltaStore, users: Mapping[str, str]) -> set[RowId]:
    rows = store.dataset("interactions").to_table(["tenant", "user", "interaction_id"])
    hashes = pa.array(sorted(users.values()), pa.string())
    candidates = rows.filter(pc.is_in(rows["user"].cast(pa.string()), hashes)).to_pylist()
    return {_row_id(row) for row in candidates if users.get(row["tenant"]) == row["user"]}


def _erased_digests(store: DeltaStore, *, users: Set[str] | None = None) -> set[str]:
    """Digests of erased interactions; with `users`, only those of the users with these digests."""
    rows = store.dataset(ERASED).to_table(["erasure_id", "kind", "digest"]).to_pylist()
    erasures = {
        row["erasure_id"]
        for row in rows
        if users is None or (row["kind"] == "user" and row["digest"] in users)
    }
    return {
        row["digest"]
        for row in rows
        if row["kind"] == "interaction" and row["erasure_id"] in erasures
    }


def _digest(row: RowId) -> str:
    return digest("interaction", tenant=row[0], name=row[1])


def _row_id(row: Mapping[str, object]) -> RowId:
    return str(row["tenant"]), str(row["interaction_id"])


def _print(answer: Lineage, *, format: str) -> None:
    if format == "json":
        content = {"subject": answer.subject, **answer.summary, "lines": list(answer.rows)}
        json.dump(content, sys.stdout, default=str)
        sys.stdout.write("\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 400, emoji=False)
    console.print(answer.subject, dict(answer.summary), markup=False)
    if answer.rows:
        table = Table(*map(str, answer.rows[0]))
        for row in answer.rows[:_MAX_PRINTED_ROWS]:
            table.add_row(*map(str, row.values()))
        console.print(table, markup=False)
    if len(answer.rows) > _MAX_PRINTED_ROWS:
        console.print(
            f"the first {_MAX_PRINTED_ROWS} of {len(answer.rows)}; --format json prints all"
        )
