"""Erases a person from the tables: `onlinerl erase`.

    ids -> excluded -> outside copies
    -> rounds of (mark, delete, mark, remove files, cut logs) -> proof, mark

First, ingest is told which events it may not store any more, so that no row comes back during the
steps that follow. Each round reads every file and removes the traces that it finds. A round that
finds nothing is the proof, and the erasure is done. A snapshot may be created at any moment, so
snapshots are marked before and after the deletion, and once more at the end. Every step can be
repeated: if the process dies, another one continues.
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
from onlinerl.rollout_store.erasure.person_ids import IdsByTenant, PersonIds, find_ids
from onlinerl.rollout_store.erasure.redaction import redact
from onlinerl.rollout_store.erasure.report import ErasureReport
from onlinerl.rollout_store.erasure.scan import ScanResult, Trace, TraceMatcher, scan
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

STEPS = (
    "planned",
    "excluded",
    "copies_forgotten",
    "marked",
    "deleted",
    "files_removed",
    "proven",
)
"""Points at which `fault` is called, so that a test can end the process there."""

_ORDER = ("feedback", "dead_letters", "interactions")
"""Interactions come last, because the other rows of a person are found through them."""
_MAX_ROUNDS = 12


class OutsideCopy(Protocol):
    """A place outside the tables that holds data of a person, such as the gateway's spool."""

    @property
    def name(self) -> str:
        """The name of the place in the report."""
        ...

    def forget(self, ids: IdsByTenant) -> int:
        """Remove every entry of the person before returning; returns the number of entries."""
        ...


VersionsTrainedOn = Callable[[IdsByTenant], Mapping[int, int] | None]
"""Maps each policy version that was trained on rows with these ids to the number of such rows; None
when the registry does not answer."""


@dataclass(frozen=True, kw_only=True)
class Erasure:
    """Erases one person; call `plan` to see what would be erased and `run` to erase it.

    Args:
        store: Where the tables lie.
        state_file: Keeps the progress between attempts.
        actor: Who asks, for the table `audit`.
        copies: Places outside the tables; they are cleared before the tables.
        trained_on: Tells which policy versions were trained on the rows.
        settle_s: Seconds for which a commit of a new file is waited for. A file that is younger
            and that no version refers to may still be committed.
        on_file: Called after every file that was read.
        fault: Called with each of `STEPS`.
        now: The time.
        sleep: Waits for a number of seconds.
    """

    store: DeltaStore
    state_file: StateFile
    actor: str
    copies: Sequence[OutsideCopy] = ()
    trained_on: VersionsTrainedOn = lambda ids: None
    settle_s: float = 30.0
    on_file: Callable[[], None] = lambda: None
    fault: Callable[[str], None] = lambda step: None
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], None] = time.sleep

    def plan(self, users: Mapping[str, str]) -> ErasureState:
        """What would be erased; changes nothing.

        Args:
            users: Hash of the person by tenant.
        """
        state = self.state_file.load() or ErasureState(
            erasure_id=uuid.uuid4().hex, started_at=self.now(), tenants={}
        )
        # Since the first attempt, a tenant may have been added, and another may have lost its rows.
        state = state.with_ids(_ids_of(users) | state.ids)
        return state.with_ids(find_ids(self.store, state.ids, on_file=self.on_file))

    def run(self, users: Mapping[str, str]) -> ErasureReport:
        """Erase the person and prove it.

        Args:
            users: Hash of the person by tenant.

        Raises:
            StoreConflict: traces came back in every round; the next call continues.
            ServiceUnavailable: a storage failed; the next call continues.
        """
        self.store.create()
        state = self.plan(users)
        self.state_file.save(state)
        self.fault("planned")
        excluded_at = self.now()
        _exclude(self.store, state, at=excluded_at)
        self.fault("excluded")
        forgotten = self._forget_copies(state)
        self.fault("copies_forgotten")
        versions = self.trained_on(state.ids)
        known = state.tenants
        state, proof = self._rounds(state, excluded_at=excluded_at)
        if state.tenants != known:
            forgotten.update(self._forget_copies(state))
        report = _report(state, proof, forgotten=forgotten, versions=versions, at=self.now())
        self._record(report)
        self.fault("proven")
        self.state_file.remove()
        return report

    def _forget_copies(self, state: ErasureState) -> Counter[str]:
        return Counter({copy.name: copy.forget(state.ids) for copy in self.copies})

    def _rounds(
        self, state: ErasureState, *, excluded_at: datetime
    ) -> tuple[ErasureState, ScanResult]:
        waited_for: set[str] = set()
        for number in range(_MAX_ROUNDS):
            wider = state.with_ids(find_ids(self.store, state.ids, on_file=self.on_file))
            if wider != state:  # rows that were stored before ingest knew of the erasure
                state = wider
                self.state_file.save(state)
                _exclude(self.store, state, at=self.now())
            result = scan(
                self.store, state.ids, unfinished_before=excluded_at, on_file=self.on_file
            )
            if not result.traces:
                return self._mark(state, result.traces), result
            logger.info(
                "erasing", extra={"round": number + 1, "files_with_traces": len(result.traces)}
            )
            state = self._round(state, result.traces, waited_for=waited_for)
        raise StoreConflict(
            f"traces are still in {', '.join(sorted({t.file.path for t in result.traces}))[:500]} "
            f"after {_MAX_ROUNDS} rounds; run `onlinerl erase` again"
        )

    def _round(
        self, state: ErasureState, traces: Sequence[Trace], *, waited_for: set[str]
    ) -> ErasureState:
        by_table = {table: [t for t in traces if t.table == table] for table in _tables_of(traces)}
        state = self._mark(state, traces)
        self.fault("marked")
        counts = dict(state.num_rows)
        for table, of_table in by_table.items():
            positions = {position for trace in of_table for position in trace.positions}
            num_rows = delete_positions(self.store, table, positions)
            counts[table] = counts.get(table, 0) + num_rows
            redact(self.store, table, names_person=TraceMatcher(state.ids).in_text)
        state = state.model_copy(update={"num_rows": {k: v for k, v in counts.items() if v}})
        state = self._mark(state, traces)
        self.fault("deleted")
        num_files = sum(
            self._remove_files(table, of_table, waited_for=waited_for)
            for table, of_table in by_table.items()
        )
        self.fault("files_removed")
        return state.model_copy(update={"num_files": state.num_files + num_files})

    def _mark(self, state: ErasureState, traces: Sequence[Trace]) -> ErasureState:
        marked = _mark(self.store, state, traces, actor=self.actor, at=self.now())
        state = state.model_copy(update={"marked": (*state.marked, *marked)})
        self.state_file.save(state)
        return state

    def _remove_files(self, table: str, traces: Sequence[Trace], *, waited_for: set[str]) -> int:
        """Remove files with traces; returns how many. Young files are left to the next round."""
        files = TableFiles(self.store, table)
        needed = referenced(self.store, table)
        wait_s = 0.0
        num_removed = 0
        for trace in traces:
            path = f"{table}/{trace.file.path}"
            if _is_of_log(trace.file) or trace.file.path in needed:
                continue
            left_s = 0.0 if trace.was_referenced else self._settle_left_s(trace.file)
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

    def _settle_left_s(self, file: StoredFile) -> float:
        """Seconds for which the file may still be committed, even if a clock went back."""
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


def _ids_of(users: Mapping[str, str]) -> dict[str, PersonIds]:
    return {tenant: PersonIds(user=user) for tenant, user in users.items()}


def _is_of_log(file: StoredFile) -> bool:
    return file.is_log and not file.is_unfinished


def _tables_of(traces: Sequence[Trace]) -> list[str]:
    """The tables with traces, in the order in which rows are deleted."""
    tables = {trace.table for trace in traces}
    return [*(t for t in _ORDER if t in tables), *sorted(tables - set(_ORDER))]


def _exclude(store: DeltaStore, state: ErasureState, *, at: datetime) -> None:
    """Tell ingest which events not to store; a repeat adds ids that were found since."""
    rows = [
        ErasedRow(
            erasure_id=state.erasure_id,
            kind=kind,
            digest=digest(kind, tenant=tenant, name=name),
            before_at=at,
            acted_at=at,
            ingest_date=at.date(),
        )
        for tenant, part in state.ids.items()
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
    """Mark every snapshot that refers to a file with traces, or to one that was removed."""
    held = [snapshot for snapshot in snapshots(store) if snapshot.is_held(at=at)]
    # The files are listed after the snapshots, so the list has every file that a snapshot needs.
    files = {table: TableFiles(store, table).all() for table in TABLES} if held else {}
    marked = []
    for snapshot in held:
        if _refers_to_traces(store, snapshot.versions, traces, files=files):
            reason = f"rows in it were erased by {state.erasure_id}"
            mark_snapshot(store, snapshot, actor=actor, reason=reason, at=at)
            marked.append(snapshot.name)
    return marked


def _refers_to_traces(
    store: DeltaStore,
    versions: Mapping[str, int],
    traces: Sequence[Trace],
    *,
    files: Mapping[str, list[StoredFile]],
) -> bool:
    """Whether the versions need a file with traces, or can never be read again."""
    for table in versions.keys() & files.keys():
        paths = files_of_version(store, table, version=versions[table], files=files[table])
        if paths is None:
            return True
        for trace in traces:
            if trace.table == table and (_is_of_log(trace.file) or trace.file.path in paths):
                return True
    return False


def _report(
    state: ErasureState,
    proof: ScanResult,
    *,
    forgotten: Mapping[str, int],
    versions: Mapping[int, int] | None,
    at: datetime,
) -> ErasureReport:
    return ErasureReport(
        erasure_id=state.erasure_id,
        users=tuple(
            digest("user", tenant=tenant, name=part.user)
            for tenant, part in sorted(state.ids.items())
        ),
        tenants=tuple(sorted(state.tenants)),
        started_at=state.started_at,
        finished_at=at,
        num_sessions=sum(len(part.sessions) for part in state.ids.values()),
        num_interactions=sum(len(part.interactions) for part in state.ids.values()),
        rows_deleted=state.num_rows,
        files_removed=state.num_files,
        snapshots_marked=state.marked,
        copies_forgotten=dict(forgotten),
        versions_trained=None if versions is None else {str(k): v for k, v in versions.items()},
        files_scanned=proof.num_files,
        bytes_scanned=proof.num_bytes,
        traces_left=len(proof.traces),
    )
