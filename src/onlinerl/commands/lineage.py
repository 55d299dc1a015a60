"""`onlinerl lineage`: which versions learned from what, both ways.

The registry keeps, for every version, the list of rows that it learned from. Ids of erased rows are
known only as digests, which is enough to count them in those lists.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from onlinerl.commands.users import hashes_of
from onlinerl.deploy.registry.trained_rows import TrainedRows, descendants
from onlinerl.errors import ConfigError
from onlinerl.rollout_store.erasure.erased import TABLE as ERASED
from onlinerl.rollout_store.erasure.erased import digest
from onlinerl.rollout_store.query.command import existing_tables
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.delta_store import DeltaStore

if TYPE_CHECKING:
    from onlinerl.settings import Settings

RowId = tuple[str, str]
"""Tenant and interaction id."""
Wanted = Callable[[RowId], bool]
_MAX_SHOWN = 1_000


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What was found, in the form it is shown."""

    subject: str
    rows: Sequence[Mapping[str, object]]
    """One line per version, or per row of the version that was asked for."""
    summary: Mapping[str, object]
    act: str = ""
    """The subject as the table `audit` keeps it, where that differs: it holds no ids of rows."""


def run_lineage(
    settings: "Settings",
    *,
    user: str | None,
    tenant: str | None,
    version: int | None,
    interaction: str | None,
    actor: str,
    format: str,
) -> int:
    """Answer one question, and note in the table `audit` that it was asked.

    Raises:
        ConfigError: there are no tables, no such version, or no key to hash the user with.
        ServiceUnavailable: the registry or the tables do not answer.
    """
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    existing_tables(store)
    trained = open_trained_rows(settings)
    # Last, because it writes: tables that are older than this program lack some that are read here.
    store.create()
    if version is not None:
        found = of_version(store, trained, version)
    elif interaction is not None:
        found = of_interaction(store, trained, interaction)
    else:
        users = hashes_of(settings, store, user=str(user), tenant=tenant)
        found = of_user(store, trained, users)
    record_act(
        store,
        actor=actor,
        action="lineage",
        subject=found.act or found.subject,
        detail=found.summary,
        at=datetime.now(UTC),
    )
    _show(found, format=format)
    return 0


def open_trained_rows(settings: "Settings") -> TrainedRows:
    """The registry of the configuration."""
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


def of_version(store: DeltaStore, trained: TrainedRows, version: int) -> Lineage:
    """Every row that a version learned from.

    Raises:
        ConfigError: the registry has no such version.
    """
    if version not in [each.number for each in trained.versions()]:
        raise ConfigError(f"there is no version {version}; `onlinerl status` names those there are")
    table = trained.rows(version)
    rows = [] if table is None else table.to_pylist()
    erased = _erased(store, kind="interaction")
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


def of_interaction(store: DeltaStore, trained: TrainedRows, interaction: str) -> Lineage:
    """Every version that learned from an interaction, of whatever tenant."""
    found = _versions_of(
        trained, subject=f"interaction {interaction}", wanted=lambda row: row[1] == interaction
    )
    kept = digest("interaction", tenant="", name=interaction)
    return replace(found, act=f"interaction {kept}")


def of_user(store: DeltaStore, trained: TrainedRows, users: Mapping[str, str]) -> Lineage:
    """Every version that learned from a person, erased or not.

    Args:
        store: Where the rows of the person lie, or the digests of those that were erased.
        trained: The registry.
        users: Hash of the person by tenant.
    """
    present = _interactions_of(store, users)
    names = {digest("user", tenant=tenant, name=user) for tenant, user in users.items()}
    erased = _erased(store, kind="interaction", of=names)
    return _versions_of(
        trained,
        subject=f"user {' '.join(sorted(names))}",
        wanted=lambda row: row in present or _digest(row) in erased,
    )


def count_in_versions(trained: TrainedRows, wanted: Wanted) -> dict[int, int]:
    """Versions that learned from wanted rows, with how many."""
    counts = {}
    for each in trained.versions():
        table = trained.rows(each.number)
        rows = [] if table is None else table.select(["tenant", "interaction_id"]).to_pylist()
        counts[each.number] = sum(wanted(_row_id(row)) for row in rows)
    return {number: count for number, count in counts.items() if count}


def mark_versions(store: DeltaStore, trained: TrainedRows) -> dict[int, int]:
    """Note on every version how many rows that it learned from were erased, over all erasures."""
    erased = _erased(store, kind="interaction")
    counts = count_in_versions(trained, lambda row: _digest(row) in erased)
    for number, count in counts.items():
        trained.mark(number, num_erased=count)
    return counts


def _versions_of(trained: TrainedRows, *, subject: str, wanted: Wanted) -> Lineage:
    counts = count_in_versions(trained, wanted)
    inherited = descendants(trained.versions(), list(counts))
    lines: list[Mapping[str, object]] = [
        {"version": number, "rows": count, "how": "learned from them"}
        for number, count in counts.items()
    ]
    lines += [
        {"version": number, "rows": 0, "how": "trained from one that did"} for number in inherited
    ]
    return Lineage(
        subject=subject,
        rows=lines,
        summary={"versions": {str(k): v for k, v in counts.items()}, "inherited": inherited},
    )


def _interactions_of(store: DeltaStore, users: Mapping[str, str]) -> set[RowId]:
    rows = store.dataset("interactions").to_table(["tenant", "user", "interaction_id"])
    hashed = pa.array(sorted(users.values()), pa.string())
    mine = rows.filter(pa.compute.is_in(rows["user"].cast(pa.string()), hashed)).to_pylist()
    return {_row_id(row) for row in mine if users.get(row["tenant"]) == row["user"]}


def _erased(store: DeltaStore, *, kind: str, of: Iterable[str] | None = None) -> set[str]:
    """Digests of what was erased; `of` keeps only the erasures of these users."""
    rows = store.dataset(ERASED).to_table(["erasure_id", "kind", "digest"]).to_pylist()
    users = None if of is None else set(of)
    erasures = {
        row["erasure_id"]
        for row in rows
        if users is None or (row["kind"] == "user" and row["digest"] in users)
    }
    return {row["digest"] for row in rows if row["kind"] == kind and row["erasure_id"] in erasures}


def _digest(row: RowId) -> str:
    return digest("interaction", tenant=row[0], name=row[1])


def _row_id(row: Mapping[str, object]) -> RowId:
    return str(row["tenant"]), str(row["interaction_id"])


def _show(found: Lineage, *, format: str) -> None:
    if format == "json":
        content = {"subject": found.subject, **found.summary, "lines": list(found.rows)}
        json.dump(content, sys.stdout, default=str)
        sys.stdout.write("\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 400, emoji=False)
    console.print(found.subject, dict(found.summary), markup=False)
    if found.rows:
        table = Table(*map(str, found.rows[0]))
        for row in found.rows[:_MAX_SHOWN]:
            table.add_row(*map(str, row.values()))
        console.print(table, markup=False)
    if len(found.rows) > _MAX_SHOWN:
        console.print(f"the first {_MAX_SHOWN} of {len(found.rows)}; --format json has all")
