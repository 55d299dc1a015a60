"""Deletes rows that are older than the operator wants to keep."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta

import duckdb

from onlinerl.rollout_store.snapshots.named import mark_where
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.deletion import delete_where
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.sql import literal
from onlinerl.rollout_store.upkeep.config import Kept, RetentionConfig

KEPT: tuple[Kept, ...] = ("interactions", "feedback", "dead_letters")


@dataclass(frozen=True, kw_only=True)
class Expired:
    """What retention did to one table."""

    table: str
    num_rows: int
    marked: tuple[str, ...]
    """Snapshots that held such rows, or that can never be read again."""


def due_condition(config: RetentionConfig, table: Kept, *, today: date) -> str | None:
    """The SQL condition of rows whose retention has ended; None when all rows are kept forever."""
    clauses = list(_clauses(config, table, today=today))
    return " OR ".join(f"({clause})" for clause in clauses) or None


def expire(
    store: DeltaStore, config: RetentionConfig, *, actor: str, at: datetime
) -> Iterator[Expired]:
    """Delete rows whose retention has ended, table by table; a repeat finds no more rows.

    Snapshots that hold such rows are marked first, so that no snapshot protects deleted rows.
    """
    for table in KEPT:
        condition = due_condition(config, table, today=at.date())
        if condition is None or not store.exists(table):
            continue
        marked = tuple(_mark(store, table, condition, actor=actor, at=at))
        version = store.delta(table).version()
        num_due = _count(store, table, condition, version=version)
        if num_due:
            # The audit row comes first: if the process died after the deletion, nothing could tell
            # any more what was deleted.
            record_act(
                store,
                actor=actor,
                action="retention",
                subject=table,
                detail={"condition": condition, "num_rows": num_due, "marked": marked},
                at=at,
                audit_id=f"retention/{table}/{version}",
            )
            num_due = delete_where(store, table, condition)
        if num_due or marked:
            yield Expired(table=table, num_rows=num_due, marked=marked)


def _clauses(config: RetentionConfig, table: Kept, *, today: date) -> Iterator[str]:
    own = {
        each.tenant: days
        for each in config.tenants
        if table != "dead_letters" and (days := getattr(each, table)) is not None
    }
    days = getattr(config, table)
    if days is not None:
        others = f" AND tenant NOT IN ({', '.join(map(literal, own))})" if own else ""
        yield f"{_before(today, days)}{others}"
    for tenant, own_days in own.items():
        yield f"{_before(today, own_days)} AND tenant = {literal(tenant)}"


def _before(today: date, days: int) -> str:
    """Rows of whole days that have passed: a row stays at least `days` times 24 hours."""
    return f"ingest_date < {literal((today - timedelta(days=days)).isoformat())}"


def _mark(store: DeltaStore, table: Kept, condition: str, *, actor: str, at: datetime) -> list[str]:
    return mark_where(
        store,
        table,
        lambda version: _count(store, table, condition, version=version) > 0,
        actor=actor,
        reason="rows in it reached their retention",
        at=at,
    )


def _count(store: DeltaStore, table: str, condition: str, *, version: int) -> int:
    with duckdb.connect(":memory:") as connection:
        connection.register("stored", store.dataset(table, version=version))
        query = f"SELECT count(*) FROM stored WHERE {condition}"
        ((count,),) = connection.execute(query).fetchall()
    return int(count)
