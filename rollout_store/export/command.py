"""`onlinerl export`: consented rows as JSONL or as a Hugging Face dataset, in formats others read.

The window is read in runs of whole days at pinned table versions, so memory is bounded by a run and
not by the window. Every export is an act in the table `audit`: `export` before its first row is
written, and `export.done` with how many it wrote.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Literal

import duckdb
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
    """What to export, how and where to."""

    format: Format
    out: Path
    layout: Layout = "jsonl"
    since: datetime | None = None
    """Served at or after."""
    until: datetime | None = None
    """Served before."""
    policy: str | None = None
    """Of one policy; of all when absent."""
    snapshot: str | None = None
    """Read the tables as this snapshot holds them."""
    include_log: bool = False
    """Also rows that may be kept and not learned from; format `chat` only."""
    tokenizer: str = ""
    """Model folder or `tokenizer.json` that text is decoded with."""
    boundary: float = 0.0
    """Reward above which `trl-kto` says yes and below which no."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What came of it."""

    num_rows: int
    num_left_out: int
    """Rows that the format cannot hold, e.g. prompts without ChatML markers."""


class _NoText:
    """The decoder of a format that has no text."""

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
    """Export and print the result; see `export`. The middle of `rewards.clip` is the boundary."""
    low, high = rewards.clip
    request = dataclasses.replace(request, boundary=(low + high) / 2)
    done = export(store, request, actor=actor, rewards=rewards, limits=limits)
    left_out = f", {done.num_left_out} left out: not ChatML, or nothing to choose between"
    sys.stdout.write(
        f"{done.num_rows} rows in {request.out}{left_out if done.num_left_out else ''}\n"
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
    """Write the rows; the folder is only complete when this returns, and as before if it raises.

    Raises:
        ConfigError: the request cannot be met: says why and what would help.
        ServiceUnavailable: the tables cannot be read, or the act cannot be written to `audit`.
    """
    if request.include_log and request.format != "chat":
        raise ConfigError(
            f"--include-log goes with --format chat only: {request.format} is for training, and "
            "rows with consent `log` may not be learned from"
        )
    shape = shape_of(request.format, include_log=request.include_log, boundary=request.boundary)
    is_text = request.format != "tokens"
    decoder: Decoder = load_decoder(request.tokenizer) if is_text else _NoText()
    now = now or datetime.now(UTC)
    versions = _versions(store, request.snapshot, at=now)
    runs = list(_runs(store, request, versions))
    num_rows = num_left_out = 0
    with new_folder(request.out):
        # First of all, so that no copy ever lies there that the table does not know of.
        _record(store, "export", request, actor=actor)
        with _writer(request, shape) as writer, _progress() as progress:
            bar = progress.add_task("exporting", total=sum(size for _, size in runs))
            for scope, size in runs:
                with connect(
                    store, rewards=rewards, versions=versions, as_of=now, scope=scope, limits=limits
                ) as connection:
                    filled = _filled(connection, shape, request)
                    written, left_out = _export_run(connection, filled, decoder, writer)
                num_rows, num_left_out = num_rows + written, num_left_out + left_out
                progress.advance(bar, size)
        if num_left_out and not num_rows:
            raise ConfigError(
                f"none of {num_left_out} rows can be written as {request.format}: their prompts "
                "are not ChatML; export trl-sft, trl-kto or tokens instead"
            )
        done = Exported(num_rows=num_rows, num_left_out=num_left_out)
        _record(store, "export.done", request, actor=actor, done=done)
    return done


def _record(
    store: DeltaStore,
    action: str,
    request: ExportRequest,
    *,
    actor: str,
    done: Exported | None = None,
) -> None:
    record_act(
        store,
        actor=actor,
        action=action,
        subject=str(request.out),
        detail=dataclasses.asdict(request) | ({} if done is None else dataclasses.asdict(done)),
        at=datetime.now(UTC),
    )


def _filled(connection: duckdb.DuckDBPyConnection, shape: Shape, request: ExportRequest) -> Shape:
    if request.format != "tokens":
        return shape
    rows = connection.execute(REWARDS).fetchall()
    by_key = {(tenant, interaction, choice): r for interaction, choice, tenant, r in rows}
    return dataclasses.replace(shape, make=tokens(by_key))


def _export_run(
    connection: duckdb.DuckDBPyConnection, shape: Shape, decoder: Decoder, writer: RowWriter
) -> tuple[int, int]:
    """Rows written and left out of one run."""
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
    """Consecutive days with about `_ROWS_PER_RUN` interactions, and how many they hold."""
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

It holds what people wrote. Whoever asks to be forgotten must be forgotten here too.

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
