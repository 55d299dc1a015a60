"""`onlinerl export`: writes rows with consent as JSONL or as a Hugging Face dataset.

The window is read in runs of whole days at fixed table versions, so that a run and not the window
bounds the memory. Every export adds two rows to the table `audit`: `export` before its first row is
written, and `export.done` with the number of rows.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Literal

import duckdb
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import override

from onlinerl.errors import ConfigError
from onlinerl.rollout_store.config import RewardsConfig, StoreConfig
from onlinerl.rollout_store.export.files import DatasetWriter, JsonlWriter, RowWriter, new_folder
from onlinerl.rollout_store.export.rows import REWARDS, Format, Shape, shape_of, tokens
from onlinerl.rollout_store.export.text import Decoder, load_decoder
from onlinerl.rollout_store.query.command import existing_tables
from onlinerl.rollout_store.snapshots.named import readable
from onlinerl.rollout_store.tables.audit import record_act
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect
from onlinerl.rollout_store.views.scope import Scope

Layout = Literal["jsonl", "dataset"]

_ROWS_PER_RUN = 100_000
_ROWS_PER_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Which rows to export, in which format, and where to."""

    format: Format
    out: Path
    """Folder to write to; it is missing or empty."""
    layout: Layout = "jsonl"
    since: datetime | None = None
    """Only interactions that were served at or after this time."""
    until: datetime | None = None
    """Only interactions that were served before this time."""
    policy: str | None = None
    """Only interactions of this policy; all policies when absent."""
    snapshot: str | None = None
    """Read the tables as this snapshot holds them; the newest versions when absent."""
    include_log: bool = False
    """Also export rows with consent `log`, which must not be trained on; format `chat` only."""
    tokenizer: str = ""
    """Model folder or `tokenizer.json` that decodes text."""
    boundary: float = 0.0
    """Reward above which `trl-kto` labels a row true, and below which it labels it false."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    num_rows: int
    num_left_out: int
    """Rows that the format cannot hold, e.g. prompts without ChatML markers."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What to read, and how to turn it into rows."""

    shape: Shape
    decoder: Decoder
    versions: Mapping[str, int]
    runs: Sequence[tuple[Scope, int]]
    """Windows of whole days, with the number of interactions in each."""


class _NoText(Decoder):
    """The decoder of a format that has no text."""

    @override
    def decode(self, ids: object, *, skip_special_tokens: bool) -> str:
        raise AssertionError("token formats decode nothing")


def run_export(
    store: DeltaStore,
    request: ExportRequest,
    *,
    actor: str,
    rewards: RewardsConfig,
    limits: StoreConfig,
) -> int:
    """Export and print the result; see `export`. The boundary is the middle of `rewards.clip`."""
    low, high = rewards.clip
    request = dataclasses.replace(request, boundary=(low + high) / 2)
    exported = export(store, request, actor=actor, rewards=rewards, limits=limits)
    left_out = f", {exported.num_left_out} left out: not ChatML, or nothing to choose between"
    sys.stdout.write(
        f"{exported.num_rows} rows in {request.out}{left_out if exported.num_left_out else ''}\n"
    )
    return 0


def export(
    store: DeltaStore,
    request: ExportRequest,
    *,
    actor: str,
    rewards: RewardsConfig,
    limits: StoreConfig | None = None,
    now: datetime | None = None,
) -> Exported:
    """Write the rows. The folder is complete when this returns, and unchanged if it raises.

    Args:
        store: Where the tables lie.
        request: What to export and where to.
        actor: Who asks, for the table `audit`.
        rewards: How feedback becomes a reward.
        limits: Memory and threads of the queries; the defaults of `[store]` when absent.
        now: The time at which rewards are mature; now when absent.

    Raises:
        ConfigError: the request cannot be met; the message names the remedy.
        ServiceUnavailable: the tables cannot be read, or the table `audit` cannot be written.
    """
    now = now or datetime.now(UTC)
    plan = _plan(store, request, now=now)
    with new_folder(request.out):
        # The audit row comes first, so that there is never a copy that the table does not name.
        _record(store, "export", request, actor=actor)
        num_rows = num_left_out = 0
        with _writer(request, plan.shape) as writer:
            for scope in _with_progress(plan.runs):
                with connect(
                    store,
                    rewards=rewards,
                    versions=plan.versions,
                    as_of=now,
                    scope=scope,
                    limits=limits,
                ) as connection:
                    shape = _with_rewards(connection, plan.shape, request)
                    written, left_out = _export_run(connection, shape, plan.decoder, writer)
                num_rows, num_left_out = num_rows + written, num_left_out + left_out
        if num_left_out and not num_rows:
            raise ConfigError(
                f"none of {num_left_out} rows can be written as {request.format}: their prompts "
                "are not ChatML; export trl-sft, trl-kto or tokens instead"
            )
        exported = Exported(num_rows=num_rows, num_left_out=num_left_out)
        _record(store, "export.done", request, actor=actor, exported=exported)
    return exported


def _plan(store: DeltaStore, request: ExportRequest, *, now: datetime) -> _Plan:
    """Check the request and find what to read.

    Raises:
        ConfigError: the request cannot be met.
    """
    if request.include_log and request.format != "chat":
        raise ConfigError(
            f"--include-log goes with --format chat only: {request.format} is for training, and "
            "rows with consent `log` may not be learned from"
        )
    shape = shape_of(request.format, include_log=request.include_log, boundary=request.boundary)
    is_text = request.format != "tokens"
    decoder: Decoder = load_decoder(request.tokenizer) if is_text else _NoText()
    versions = _versions(store, request.snapshot, at=now)
    runs = list(_runs(store, request, versions))
    return _Plan(shape=shape, decoder=decoder, versions=versions, runs=runs)


def _with_progress(runs: Sequence[tuple[Scope, int]]) -> Iterator[Scope]:
    """The runs, with a progress bar that counts interactions when stderr is a terminal."""
    with _progress() as progress:
        bar = progress.add_task("exporting", total=sum(size for _, size in runs))
        for scope, size in runs:
            yield scope
            progress.advance(bar, size)


def _record(
    store: DeltaStore,
    action: str,
    request: ExportRequest,
    *,
    actor: str,
    exported: Exported | None = None,
) -> None:
    record_act(
        store,
        actor=actor,
        action=action,
        subject=str(request.out),
        detail=dataclasses.asdict(request)
        | ({} if exported is None else dataclasses.asdict(exported)),
        at=datetime.now(UTC),
    )


def _with_rewards(
    connection: duckdb.DuckDBPyConnection, shape: Shape, request: ExportRequest
) -> Shape:
    """The shape of `tokens` with the rewards of this run; other shapes stay as they are."""
    if request.format != "tokens":
        return shape
    rows = connection.execute(REWARDS).fetchall()
    by_key = {(tenant, interaction, choice): r for interaction, choice, tenant, r in rows}
    return dataclasses.replace(shape, make=tokens(by_key))


def _export_run(
    connection: duckdb.DuckDBPyConnection, shape: Shape, decoder: Decoder, writer: RowWriter
) -> tuple[int, int]:
    """Write one run; returns the numbers of rows that were written and left out."""
    num_rows = num_left_out = 0
    for query in shape.queries:
        for batch in connection.sql(query).to_arrow_reader(_ROWS_PER_BATCH):
            made = [shape.make(source, decoder) for source in batch.to_pylist()]
            rows = [row for row in made if row is not None]
            writer.write(rows)
            num_rows += len(rows)
            num_left_out += len(made) - len(rows)
    return num_rows, num_left_out


def _versions(store: DeltaStore, snapshot: str | None, *, at: datetime) -> Mapping[str, int]:
    if snapshot is not None:
        return readable(store, snapshot, at=at).versions
    return existing_tables(store)


def _runs(
    store: DeltaStore, request: ExportRequest, versions: Mapping[str, int]
) -> Iterator[tuple[Scope, int]]:
    """Consecutive days with about `_ROWS_PER_RUN` interactions, and their number."""
    whole = Scope(since=request.since, until=request.until, policy=request.policy)
    rows = store.dataset("interactions", version=versions["interactions"])
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("stored", rows)
        days = connection.execute(
            f"SELECT served_at::DATE, count(*) FROM stored WHERE {whole.condition()} "
            "GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    first, size = None, 0
    for day, num_rows in days:
        first, size = first or day, size + num_rows
        if size >= _ROWS_PER_RUN or day == days[-1][0]:
            yield _within(whole, first, day), size
            first, size = None, 0


def _within(whole: Scope, first: date, last: date) -> Scope:
    since = datetime(first.year, first.month, first.day, tzinfo=UTC)
    until = datetime(last.year, last.month, last.day, tzinfo=UTC) + timedelta(days=1)
    return dataclasses.replace(
        whole,
        since=max(since, whole.since or since),
        until=min(until, whole.until or until),
    )


def _writer(request: ExportRequest, shape: Shape) -> RowWriter:
    if request.layout == "jsonl":
        return JsonlWriter(request.out)
    return DatasetWriter(request.out, schema=shape.schema, card=_card(request, shape))


def _card(request: ExportRequest, shape: Shape) -> str:
    columns = "\n".join(f"- `{field.name}`: `{field.type}`" for field in shape.schema)
    return f"""\
# Rollouts of {request.policy or "every policy"}

Exported by onlinerl as `{request.format}`: {shape.about}.

- served from {request.since or "the beginning"} until {request.until or "the export"}
- snapshot: {request.snapshot or "none, the newest tables"}
- text that scrubbing hid reads `[masked]`; hidden token ids are 0

This folder contains what people wrote. When a person is erased, delete their rows here as well.

## Columns

{columns}
"""


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
    )
