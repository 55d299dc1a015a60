"""`onlinerl erase`: removes a person from the tables, the spool and the stored responses."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from onlinerl.commands import lineage
from onlinerl.commands.tables import open_store
from onlinerl.commands.users import open_user_hasher, user_hashes
from onlinerl.errors import LeaseHeld, ServiceUnavailable
from onlinerl.rollout_store.erasure.erase import Erasure, OutsideCopy
from onlinerl.rollout_store.erasure.person_ids import IdsByTenant
from onlinerl.rollout_store.erasure.report import ErasureReport
from onlinerl.rollout_store.erasure.state import StateFile
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.lease import Lease
from onlinerl.rollout_store.upkeep.process import LEASE
from onlinerl.settings import Settings

logger = logging.getLogger(__name__)

LEASE_WAIT_S = 900.0
"""Seconds to wait for a pass of `onlinerl maintain` to end."""

LEASE_POLL_S = 2.0
"""Seconds between two attempts to take the lease."""

LEASE_ATTEMPTS = 5
"""Times that the lease may be lost before the erasure fails."""


def run_erase(
    settings: Settings,
    *,
    user: str,
    tenant: str | None,
    dry_run: bool,
    actor: str,
    format: str,
) -> int:
    """Erase a person and print the report. Repeat the command after a crash to complete it.

    Args:
        settings: The configuration.
        user: The id that the product sends for the person.
        tenant: Erase in this tenant only; None means in all of them.
        dry_run: Print what would be erased and change nothing.
        actor: Who asks, for the table `audit`.
        format: `table` or `json`.

    Raises:
        ConfigError: the key that user ids are hashed with is not set, or there are no tables.
        LeaseHeld: upkeep did not end in time, or the lease was lost again and again.
        ServiceUnavailable: a storage, the spool or the stored responses did not answer in time.
        StoreConflict: new traces of the person appeared in every round.
    """
    store = open_store(settings)
    users = user_hashes(settings, store, user=user, tenant=tenant)
    erasure = Erasure(
        store=store,
        state_file=_state_file(settings, user=user, tenant=tenant),
        actor=actor,
        copies=gateway_copies(settings),
        trained_on=lambda ids: _trained_on(settings, ids),
    )
    if dry_run:
        with _progress() as count_file:
            plan = replace(erasure, on_file=count_file).plan(users)
        _print_plan(plan.ids, format=format)
        return 0
    report = _erase(erasure, users, ttl_s=settings.maintenance.lease_ttl_s)
    _mark_versions(settings, store)
    _print(report.model_dump(mode="json"), format=format)
    return 0


def _erase(erasure: Erasure, users: Mapping[str, str], *, ttl_s: float) -> ErasureReport:
    """Run the erasure under the lease of upkeep.

    A step that takes longer than `ttl_s` can lose the lease. The erasure then waits until the lease
    is free and goes on where it stopped.
    """
    for _ in range(LEASE_ATTEMPTS):
        with _lease(erasure.store, ttl_s=ttl_s) as lease, _progress() as count_file:
            try:
                return replace(erasure, on_file=_renewing(lease, count_file)).run(users)
            except LeaseHeld as error:
                logger.warning("%s; the erasure goes on when it is free", error)
    raise LeaseHeld(
        f"the lease of upkeep was lost {LEASE_ATTEMPTS} times; set maintenance.lease_ttl_s "
        f"(now {ttl_s:g} s) above the longest step of the erasure and repeat the command"
    )


def _renewing(lease: Lease, count_file: Callable[[], None]) -> Callable[[], None]:
    def on_file() -> None:
        count_file()
        lease.renew()

    return on_file


def _state_file(settings: Settings, *, user: str, tenant: str | None) -> StateFile:
    """The file that lets a repeated command go on with the erasure that a crash interrupted.

    The command's own user and tenant name it, because the set of tenants with rows of the person
    shrinks while they are deleted.
    """
    tenant_name = tenant or ""
    user_hash = open_user_hasher().hash(user, tenant=tenant_name)
    assert user_hash is not None
    return StateFile(settings.folder("erasures"), users=[(tenant_name, user_hash)])


def gateway_copies(settings: Settings) -> list[OutsideCopy]:
    """The copies of interactions that the gateway of this machine keeps beside the tables."""
    spool = settings.gateway.spool.dir
    responses = settings.gateway.responses.path
    return [
        SpoolCopy(folder=Path(spool) if spool else settings.folder("spool")),
        ResponsesCopy(path=Path(responses) if responses else settings.folder("responses.sqlite")),
    ]


@dataclass(frozen=True, kw_only=True)
class SpoolCopy(OutsideCopy):
    """Events in the gateway's spool, not yet shipped or not yet confirmed by the tables."""

    folder: Path
    name: str = "spool"

    @override
    def forget(self, ids: IdsByTenant) -> int:
        """Remove the events of the person, and all events in their sessions."""
        from onlinerl.serving.spool.forgetting import forget_user

        return sum(
            forget_user(
                self.folder, part.user, tenant=tenant, names=part.sessions | part.interactions
            )
            for tenant, part in ids.items()
        )


@dataclass(frozen=True, kw_only=True)
class ResponsesCopy(OutsideCopy):
    """Responses that `/v1/responses` stores."""

    path: Path
    name: str = "responses"

    @override
    def forget(self, ids: IdsByTenant) -> int:
        """Remove the responses to the person, and all responses in their sessions."""
        from onlinerl.serving.protocols.responses.sqlite_store import forget_user

        return sum(
            forget_user(self.path, tenant=tenant, user=part.user, sessions=part.sessions)
            for tenant, part in ids.items()
        )


@contextmanager
def _lease(store: DeltaStore, *, ttl_s: float) -> Iterator[Lease]:
    """Hold the lease of upkeep, whose compaction would move rows to files already searched."""
    store.create()
    with ExitStack() as stack:
        yield _wait_for_lease(stack, store, ttl_s=ttl_s)


def _wait_for_lease(stack: ExitStack, store: DeltaStore, *, ttl_s: float) -> Lease:
    deadline = time.monotonic() + LEASE_WAIT_S
    while True:
        try:
            return stack.enter_context(Lease(store, name=LEASE, ttl_s=ttl_s))
        except LeaseHeld as error:
            if time.monotonic() > deadline:
                raise
            logger.info("waiting for upkeep to end: %s", error)
            time.sleep(LEASE_POLL_S)


def _trained_on(settings: Settings, ids: IdsByTenant) -> dict[int, int] | None:
    """Number of rows of the person that each version learned from; None without a registry."""

    def is_of_person(row: lineage.RowId) -> bool:
        tenant, interaction = row
        return tenant in ids and interaction in ids[tenant].interactions

    try:
        return lineage.count_in_versions(lineage.open_trained_rows(settings), is_of_person)
    except ServiceUnavailable as error:
        logger.warning(
            "the report cannot name the versions that learned from the person: %s", error
        )
        return None


def _mark_versions(settings: Settings, store: DeltaStore) -> None:
    """Tag versions that learned from erased rows, for people who look at them in MLflow.

    A registry that is away fails nothing: `onlinerl lineage` finds the versions without the tag.
    """
    try:
        rows_by_version = lineage.mark_versions(store, lineage.open_trained_rows(settings))
    except ServiceUnavailable as error:
        logger.warning("versions that learned from erased rows could not be tagged: %s", error)
    else:
        logger.info(
            "versions that learned from erased rows", extra={"rows_by_version": rows_by_version}
        )


@contextmanager
def _progress() -> Iterator[Callable[[], None]]:
    """Show the number of searched files on standard error if it is a terminal.

    Yields a function to call once per file.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed} files searched"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("erase", total=None)
        yield lambda: bar.advance(task)


def _print_plan(ids: IdsByTenant, *, format: str) -> None:
    tenants = [
        {
            "tenant": tenant,
            "sessions": len(part.sessions),
            "interactions": len(part.interactions),
        }
        for tenant, part in sorted(ids.items())
    ]
    _print({"would_erase": tenants}, format=format)


def _print(content: Mapping[str, object], *, format: str) -> None:
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
