"""`onlinerl erase`: forget a person everywhere, and prove it."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onlinerl.commands import lineage
from onlinerl.commands.users import hashes_of, user_hasher
from onlinerl.errors import LeaseHeld, ServiceUnavailable
from onlinerl.rollout_store.erasure.erase import Erasure, OutsideCopy
from onlinerl.rollout_store.erasure.report import ErasureReport
from onlinerl.rollout_store.erasure.scope import Scope
from onlinerl.rollout_store.erasure.state import StateFile
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.rollout_store.upkeep.process import LEASE

if TYPE_CHECKING:
    from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

LEASE_WAIT_S, LEASE_POLL_S = 900.0, 2.0
"""How long a pass of `onlinerl maintain` is waited for, and how often it is looked for."""
LEASE_ATTEMPTS = 5
"""How often the lease may be lost; `[maintenance].lease_ttl_s` is too short then."""


def run_erase(
    settings: "Settings",
    *,
    user: str,
    tenant: str | None,
    dry_run: bool,
    actor: str,
    format: str,
) -> int:
    """Erase a person and show the report; a repeat, also after a crash, completes it.

    Raises:
        ConfigError: there is no key to hash the user with, or there are no tables.
        ServiceUnavailable: a storage, the spool or the stored answers did not do it in time.
        StoreConflict: traces came back again and again.
    """
    store = DeltaStore(settings.store_root, settings.store.storage_options)
    users = hashes_of(settings, store, user=user, tenant=tenant)
    erasure = Erasure(
        store=store,
        state_file=_state_file(settings, user=user, tenant=tenant),
        actor=actor,
        copies=copies_of(settings),
        trained_on=lambda scope: _trained_on(settings, scope),
    )
    if dry_run:
        with _progress() as on_file:
            plan = replace(erasure, on_file=on_file).plan(users)
        _show_plan(plan.scope, format=format)
        return 0
    report = _erase(erasure, users, ttl_s=settings.maintenance.lease_ttl_s)
    _mark_versions(settings, store)
    _show(report, format=format)
    return 0


def _erase(erasure: Erasure, users: Mapping[str, str], *, ttl_s: float) -> ErasureReport:
    """Under the lease of upkeep; one that is lost in a long step is taken again, and it goes on."""
    attempt = 0
    while True:
        with _lease(erasure.store, ttl_s=ttl_s) as lease, _progress() as on_file:

            def alive(lease: Lease = lease, on_file: Callable[[], None] = on_file) -> None:
                on_file()
                lease.renew()

            try:
                return replace(erasure, on_file=alive).run(users)
            except LeaseHeld as error:
                attempt += 1
                if attempt == LEASE_ATTEMPTS:
                    raise
                logger.warning("%s; the erasure goes on when it is free", error)


def _state_file(settings: "Settings", *, user: str, tenant: str | None) -> StateFile:
    """Named by what was asked for: which tenants have rows changes while these are deleted."""
    asked = tenant or ""
    hashed = user_hasher().hash(user, tenant=asked)
    assert hashed is not None
    return StateFile(settings.folder("erasures"), users=[(asked, hashed)])


def copies_of(settings: "Settings") -> list[OutsideCopy]:
    """What the gateway of this machine keeps beside the tables."""
    spool = settings.gateway.spool.dir
    responses = settings.gateway.responses.path
    return [
        SpoolCopy(folder=Path(spool) if spool else settings.folder("spool")),
        ResponsesCopy(path=Path(responses) if responses else settings.folder("responses.sqlite")),
    ]


@dataclass(frozen=True, kw_only=True)
class SpoolCopy:
    """Events that wait for the log, or are kept until the tables confirm them."""

    folder: Path
    name: str = "spool"

    def forget(self, scope: Scope) -> int:
        """The events of the person, and whosever in their sessions."""
        from onlinerl.serving.spool.forgetting import forget_user

        return sum(
            forget_user(
                self.folder, part.user, tenant=tenant, names=part.sessions | part.interactions
            )
            for tenant, part in scope.items()
        )


@dataclass(frozen=True, kw_only=True)
class ResponsesCopy:
    """Answers that `/v1/responses` keeps."""

    path: Path
    name: str = "responses"

    def forget(self, scope: Scope) -> int:
        """The answers to the person, and to whomever in their sessions."""
        from onlinerl.serving.protocols.responses.sqlite_store import forget_user

        return sum(
            forget_user(self.path, tenant=tenant, user=part.user, sessions=part.sessions)
            for tenant, part in scope.items()
        )


@contextmanager
def _lease(store: DeltaStore, *, ttl_s: float) -> Iterator[Lease]:
    """Apart from upkeep: a compaction would carry rows into new files while they are looked for."""
    store.create()
    deadline = time.monotonic() + LEASE_WAIT_S
    while True:
        lease = Lease(store, name=LEASE, ttl_s=ttl_s)
        try:
            lease.take()
            break
        except LeaseHeld as error:
            if time.monotonic() > deadline:
                raise
            logger.info("waiting for upkeep to end: %s", error)
            time.sleep(LEASE_POLL_S)
    try:
        yield lease
    finally:
        lease.give_back()


def _trained_on(settings: "Settings", scope: Scope) -> dict[int, int] | None:
    def wanted(row: tuple[str, str]) -> bool:
        tenant, interaction = row
        return tenant in scope and interaction in scope[tenant].interactions

    try:
        return lineage.count_in_versions(lineage.open_trained_rows(settings), wanted)
    except ServiceUnavailable as error:
        logger.warning("it is not known which versions learned from the rows: %s", error)
        return None


def _mark_versions(settings: "Settings", store: DeltaStore) -> None:
    """The tag is for people; `onlinerl lineage` finds the same without it."""
    try:
        marked = lineage.mark_versions(store, lineage.open_trained_rows(settings))
    except ServiceUnavailable as error:
        logger.warning("versions that learned from erased rows are not marked: %s", error)
    else:
        logger.info("versions that learned from erased rows", extra={"rows_by_version": marked})


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """A count of files on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed} files looked through"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("erase", total=None)
        yield lambda: bar.advance(task)


def _show_plan(scope: Scope, *, format: str) -> None:
    lines = [
        {
            "tenant": tenant,
            "sessions": len(part.sessions),
            "interactions": len(part.interactions),
        }
        for tenant, part in sorted(scope.items())
    ]
    _write({"would_erase": lines}, format=format)


def _show(report: ErasureReport, *, format: str) -> None:
    _write(report.model_dump(mode="json"), format=format)


def _write(content: Mapping[str, object], *, format: str) -> None:
    if format == "json":
        json.dump(content, sys.stdout)
        sys.stdout.write("\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value")
    for name, value in content.items():
        table.add_row(name, json.dumps(value) if not isinstance(value, str) else value)
    Console(width=None if sys.stdout.isatty() else 200, emoji=False).print(table, markup=False)
