"""A person is forgotten: `onlinerl erase`.

    scope -> barred -> outside copies
    -> rounds of (mark, delete, mark, remove files, cut logs) -> proof, mark

First ingest is told what it may not store any more, so that nothing comes back behind the back of
what follows. A round looks through every file and acts on what it finds; the erasure is done when a
round finds nothing, and that round is the proof. A snapshot may be made at any moment, so they are
marked before and after the deletion, and once more at the end. Every step can be repeated, so a
process that died anywhere is simply followed by another one.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from onlinerl.errors import StoreConflict
from onlinerl.rollout_store.erasure.erased import Kind, digest
from onlinerl.rollout_store.erasure.redaction import redact
from onlinerl.rollout_store.erasure.report import ErasureReport
from onlinerl.rollout_store.erasure.scan import Needles, Scanned, Trace, scan
from onlinerl.rollout_store.erasure.scope import Scope, TenantScope, find_scope
from onlinerl.rollout_store.erasure.state import ErasureState, StateFile
from onlinerl.rollout_store.schema import TABLES, ErasedRow
from onlinerl.rollout_store.snapshots.named import mark_snapshot, snapshots
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.deletion import delete_positions
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.tables.files import StoredFile, TableFiles, referenced
from onlinerl.rollout_store.tables.log import cut_log, files_of_version
from onlinerl.rollout_store.tables.rows import to_table

logger = logging.getLogger(__name__)

STEPS = ("planned", "barred", "copies_forgotten", "marked", "deleted", "files_removed", "proven")
"""Points at which `fault` is called; a test may end the process there."""

_ORDER = ("feedback", "dead_letters", "interactions")
"""Interactions last: what else belongs to a person is found through them."""
_MAX_ROUNDS = 12


class OutsideCopy(Protocol):
    """Something beside the tables that holds what a person said."""

    @property
    def name(self) -> str:
        """Named so in the report."""
        ...

    def forget(self, scope: Scope) -> int:
        """Forget all of it, now; returns how many entries there were."""
        ...


VersionsTrainedOn = Callable[[Scope], Mapping[int, int] | None]
"""Versions of the policy by number, with how many rows of the scope each was trained on; None when
the registry cannot be asked."""


@dataclass(frozen=True, kw_only=True)
class Erasure:
    """What an erasure works with.

    Args:
        store: Where the tables lie.
        state_file: What is remembered between attempts.
        actor: Who asks, for the table `audit`.
        copies: Forgotten before the tables are.
        trained_on: Asked which versions learned from the rows.
        settle_s: A file that was written less than this many seconds ago may belong to a commit
            that is about to happen, so it is waited for.
        on_file: Told of every file that was read.
        fault: Called with each of `STEPS`.
    """

    store: DeltaStore
    state_file: StateFile
    actor: str
    copies: Sequence[OutsideCopy] = ()
    trained_on: VersionsTrainedOn = lambda scope: None
    settle_s: float = 30.0
    on_file: Callable[[], None] = lambda: None
    fault: Callable[[str], None] = lambda step: None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], None] = time.sleep

    def plan(self, users: Mapping[str, str]) -> ErasureState:
        """What would be erased; nothing is changed.

        Args:
            users: Hash of the person by tenant.
        """
        state = self.state_file.load() or ErasureState(
            erasure_id=uuid.uuid4().hex, started_at=self.now(), tenants={}
        )
        # A tenant may be new since the first attempt, and one may have no rows left since.
        state = state.with_scope(_scope_of(users) | state.scope)
        return state.with_scope(find_scope(self.store, state.scope, on_file=self.on_file))

    def run(self, users: Mapping[str, str]) -> ErasureReport:
        """Erase, and prove it.

        Raises:
            StoreConflict: traces came back again and again; the next call goes on.
            ServiceUnavailable: a storage failed; the next call goes on.
        """
        self.store.create()
        state = self.plan(users)
        self.state_file.save(state)
        self.fault("planned")
        barred_at = self.now()
        _bar(self.store, state, at=barred_at)
        self.fault("barred")
        forgotten = self._forget_copies(state)
        self.fault("copies_forgotten")
        versions = self.trained_on(state.scope)
        known = state.tenants
        state, proof = self._rounds(state, barred_at=barred_at)
        if state.tenants != known:
            forgotten.update(self._forget_copies(state))
        report = _report(state, proof, forgotten=forgotten, versions=versions, at=self.now())
        self._record(report)
        self.fault("proven")
        self.state_file.remove()
        return report

    def _forget_copies(self, state: ErasureState) -> Counter[str]:
        return Counter({copy.name: copy.forget(state.scope) for copy in self.copies})

    def _rounds(self, state: ErasureState, *, barred_at: datetime) -> tuple[ErasureState, Scanned]:
        waited_for: set[str] = set()
        for number in range(_MAX_ROUNDS):
            wider = state.with_scope(find_scope(self.store, state.scope, on_file=self.on_file))
            if wider != state:  # stored while ingest was not told yet
                state = wider
                self.state_file.save(state)
                _bar(self.store, state, at=self.now())
            found = scan(self.store, state.scope, unfinished_before=barred_at, on_file=self.on_file)
            if not found.traces:
                return self._mark(state, found.traces), found
            logger.info(
                "erasing", extra={"round": number + 1, "files_with_traces": len(found.traces)}
            )
            state = self._round(state, found.traces, waited_for=waited_for)
        raise StoreConflict(
            f"traces are still in {', '.join(sorted({t.file.path for t in found.traces}))[:500]} "
            f"after {_MAX_ROUNDS} rounds; run `onlinerl erase` again"
        )

    def _round(
        self, state: ErasureState, traces: Sequence[Trace], *, waited_for: set[str]
    ) -> ErasureState:
        by_table = {table: [t for t in traces if t.table == table] for table in _ordered(traces)}
        state = self._mark(state, traces)
        self.fault("marked")
        counts = dict(state.num_rows)
        for table, found in by_table.items():
            positions = {each for trace in found for each in trace.positions}
            num_rows = delete_positions(self.store, table, positions)
            counts[table] = counts.get(table, 0) + num_rows
            redact(self.store, table, names_them=Needles(state.scope).in_text)
        state = state.model_copy(update={"num_rows": {k: v for k, v in counts.items() if v}})
        state = self._mark(state, traces)
        self.fault("deleted")
        num_files = sum(
            self._remove_files(table, found, waited_for=waited_for)
            for table, found in by_table.items()
        )
        self.fault("files_removed")
        return state.model_copy(update={"num_files": state.num_files + num_files})

    def _mark(self, state: ErasureState, traces: Sequence[Trace]) -> ErasureState:
        marked = _mark(self.store, state, traces, actor=self.actor, at=self.now())
        state = state.model_copy(update={"marked": (*state.marked, *marked)})
        self.state_file.save(state)
        return state

    def _remove_files(self, table: str, traces: Sequence[Trace], *, waited_for: set[str]) -> int:
        """Files that no version may show any more; what is too young is left to the next round."""
        files = TableFiles(self.store, table)
        needed = referenced(self.store, table)
        wait_s = 0.0
        num_removed = 0
        for trace in traces:
            path = f"{table}/{trace.file.path}"
            if _is_of_log(trace.file) or trace.file.path in needed:
                continue
            left_s = 0.0 if trace.was_referenced else self._youth_s(trace.file)
            if left_s > 0 and path not in waited_for:
                waited_for.add(path)
                wait_s = max(wait_s, left_s)
                continue
            files.remove(trace.file)
            num_removed += 1
        if any(_is_of_log(trace.file) for trace in traces):
            cut_log(self.store, table)
        if wait_s:
            self.sleep(wait_s)
        return num_removed

    def _youth_s(self, file: StoredFile) -> float:
        """Seconds for which a commit of it may still come; clocks may have gone back since."""
        age_s = (self.now() - file.modified_at).total_seconds()
        return min(self.settle_s - age_s, self.settle_s)

    def _record(self, report: ErasureReport) -> None:
        record_act(
            self.store,
            actor=self.actor,
            action="erase",
            subject=" ".join(report.users),
            detail=report.model_dump(mode="json", exclude={"users"}),
            at=report.finished_at,
            audit_id=report.erasure_id,
        )


def _scope_of(users: Mapping[str, str]) -> dict[str, TenantScope]:
    return {tenant: TenantScope(user=user) for tenant, user in users.items()}


def _is_of_log(file: StoredFile) -> bool:
    return file.is_log and not file.is_unfinished


def _ordered(traces: Sequence[Trace]) -> list[str]:
    found = {trace.table for trace in traces}
    return [*(t for t in _ORDER if t in found), *sorted(found - set(_ORDER))]


def _bar(store: DeltaStore, state: ErasureState, *, at: datetime) -> None:
    """Tell ingest what not to store; a repeat adds what was found since."""
    rows = [
        ErasedRow(
            erasure_id=state.erasure_id,
            kind=kind,
            digest=digest(kind, tenant=tenant, name=name),
            before_at=at,
            acted_at=at,
            ingest_date=at.date(),
        )
        for tenant, part in state.scope.items()
        for kind, names in _names(part.user, part.sessions, part.interactions).items()
        for name in sorted(names)
    ]
    store.append("erased", to_table(rows))


def _names(
    user: str, sessions: frozenset[str], interactions: frozenset[str]
) -> dict[Kind, frozenset[str]]:
    return {"user": frozenset({user}), "session": sessions, "interaction": interactions}


def _mark(
    store: DeltaStore,
    state: ErasureState,
    traces: Sequence[Trace],
    *,
    actor: str,
    at: datetime,
) -> list[str]:
    """Mark every snapshot that refers to a file that has to go, or to one that went."""
    held = [snapshot for snapshot in snapshots(store) if snapshot.is_held(at=at)]
    # Looked for after the snapshots: every file of these was there before them.
    there = {table: TableFiles(store, table).all() for table in TABLES} if held else {}
    marked = []
    for snapshot in held:
        if _refers(store, snapshot.versions, traces, there=there):
            reason = f"rows in it were erased by {state.erasure_id}"
            mark_snapshot(store, snapshot, actor=actor, reason=reason, at=at)
            marked.append(snapshot.name)
    return marked


def _refers(
    store: DeltaStore,
    versions: Mapping[str, int],
    traces: Sequence[Trace],
    *,
    there: Mapping[str, list[StoredFile]],
) -> bool:
    for table in versions.keys() & there.keys():
        paths = files_of_version(store, table, version=versions[table], there=there[table])
        if paths is None:
            return True
        for trace in traces:
            if trace.table == table and (_is_of_log(trace.file) or trace.file.path in paths):
                return True
    return False


def _report(
    state: ErasureState,
    proof: Scanned,
    *,
    forgotten: Mapping[str, int],
    versions: Mapping[int, int] | None,
    at: datetime,
) -> ErasureReport:
    return ErasureReport(
        erasure_id=state.erasure_id,
        users=tuple(
            digest("user", tenant=tenant, name=part.user)
            for tenant, part in sorted(state.scope.items())
        ),
        tenants=tuple(sorted(state.tenants)),
        started_at=state.started_at,
        finished_at=at,
        num_sessions=sum(len(part.sessions) for part in state.scope.values()),
        num_interactions=sum(len(part.interactions) for part in state.scope.values()),
        rows_deleted=state.num_rows,
        files_removed=state.num_files,
        snapshots_marked=state.marked,
        copies_forgotten=dict(forgotten),
        versions_trained=None if versions is None else {str(k): v for k, v in versions.items()},
        files_scanned=proof.num_files,
        bytes_scanned=proof.num_bytes,
        traces_left=len(proof.traces),
    )
