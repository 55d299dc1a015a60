"""Measures the rollout store: bytes per token, reading a window, joining rewards; see `METHOD`."""

import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from pyarrow import parquet

from benchmarks.result import RESULTS, write_result
from benchmarks.rollouts import (
    START,
    batches,
    days_after,
    feedback_table,
    interactions_table,
    make_turns,
)
from onlinerl.rollout_store.config import MetricConfig, RewardsConfig, StoreConfig
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect
from onlinerl.rollout_store.views.scope import Scope
from onlinerl.rollout_store.views.window import read_window
from onlinerl.trainer.rollouts.advantages import Advantages
from onlinerl.trainer.rollouts.rows import WindowRow
from onlinerl.trainer.rollouts.segments import build_data
from onlinerl.trainer.rollouts.source import DeltaSource

METHOD = """\
Synthetic rollouts (benchmarks/rollouts.py: Zipf ids over 49,152, logprobs of a sharp chat model,
random UUIDs), committed through DeltaStore.append in batches of 5,000 rows as ingest commits them.
Storage: 500 sessions of ten turns, 300 + 60 prompt tokens, then 60 per turn, 200 sampled. Bytes per
sampled token are the Parquet column chunks of ids, logprobs and version spans. The whole table is
compared with JSONL of the same rows, with numbers as Python's json writes those of an engine, and
with JSONL in which every turn repeats its full prompt.
Window: the newest 100,000 of 150,000 interactions (20 M sampled tokens) into Arrow batches with
window.read_window, from opening the table to the last batch, compared with pyarrow.parquet on the
same files. Medians of five alternating runs after a warm-up. The series also holds the same rows
through the SQL view, and the training segments built from them.
Training data: 10,000 completions in 1,000 conversations (2 M sampled of 2.9 M tokens), from the
tables to the arrays that the trainer's backend is given; new processes, medians of three. Bytes per
token are the highest resident memory above that before the read, query engine included.
Rewards: feedback (two metrics, three sources, one row in ten on a session) on a tenth as many
interactions, from 10,000 to 1,000,000 rows, all rewards into Arrow, in a new process for each run;
medians of three, and the highest peak of a process, libraries included. The exponent is the slope
of log time over log rows."""

NOTES = """\
Token ids drawn independently compress worse than text, so bytes per token are an upper bound for
the same vocabulary. An engine's JSON has 17 digits per logprob; compared with JSONL with the 9 that
a float32 needs (series, jsonl_float32_digits), the table is 3.7 times smaller, not 4. The disk is
local and the files are in the page cache, so the ratio measures CPU and not an object store. The
SQL view takes about three times as long as pyarrow.parquet (series), because every value passes
through the query engine. The time of a reward join includes opening the tables, which flattens the
curve at small sizes; the series holds each size."""

SAMPLED_COLUMNS = ("completion_token_ids", "logprobs", "version_spans")
JOIN_SIZES = (10_000, 31_600, 100_000, 316_000, 1_000_000)
REPEATS = 5
JOIN_REPEATS = 3
REWARDS = RewardsConfig(
    metrics=(
        MetricConfig(name="accepted", type="bool", threshold=0.25),
        MetricConfig(name="stars", aggregate="mean", scale=0.5),
    ),
    sources={"judge": 0.5},
    session_discount=0.9,
    attribution_window_s=86_400.0,
    user_cap=0.2,
)
LIMITS = StoreConfig(query_memory_mib=1_024, query_threads=2)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Sizes of the ten-turn workload, bytes."""

    num_sampled: int
    sampled_columns: int
    table: int
    jsonl: int
    jsonl_float32_digits: int
    per_turn_jsonl: int


def measure_storage(folder: Path, *, num_sessions: int) -> Storage:
    """Write the workload as tables and as JSONL in three ways."""
    random = np.random.default_rng(0)
    turns = make_turns(random, num_sessions=num_sessions, turns=10)
    rows = interactions_table(random, turns, ingest_day=START)
    store = DeltaStore(str(folder / "storage"))
    store.create()
    for batch in batches(rows, 5_000):
        store.append("interactions", batch)
    files = _files(store, "interactions")
    jsonl = short = per_turn = 0
    before: list[int] = []
    for row in _json_rows(rows):
        jsonl += _size(row)
        short += _size(_shortest(row))
        if row["prefix_length"] == 0:
            before = []
        whole = before + row["prompt_token_ids"]
        per_turn += _size(row | {"prompt_token_ids": whole})
        before = whole + row["completion_token_ids"]
    return Storage(
        num_sampled=int(turns.num_sampled.sum()),
        sampled_columns=sum(_column_bytes(file) for file in files),
        table=sum(file.stat().st_size for file in files),
        jsonl=jsonl,
        jsonl_float32_digits=short,
        per_turn_jsonl=per_turn,
    )


def _json_rows(rows: pa.Table) -> Sequence[dict[str, Any]]:
    dictionaries: list[dict[str, Any]] = rows.to_pylist()
    return dictionaries


def _shortest(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the fewest digits per logprob that read back as the same float32."""
    return row | {"logprobs": [float(str(np.float32(value))) for value in row["logprobs"]]}


def _size(row: dict[str, Any]) -> int:
    return len(json.dumps(row, default=str, separators=(",", ":"))) + 1


def _column_bytes(file: Path) -> int:
    metadata = parquet.ParquetFile(file).metadata
    return sum(
        metadata.row_group(group).column(column).total_compressed_size
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
        if metadata.row_group(group).column(column).path_in_schema.startswith(SAMPLED_COLUMNS)
    )


def _files(store: DeltaStore, table: str) -> list[Path]:
    return [Path(store.root) / table / file for file in store.dataset(table).files]


@dataclass(frozen=True, kw_only=True)
class WindowRead:
    """Seconds of each run, by way of reading."""

    window: list[float]
    bare: list[float]
    view: list[float]
    segments: list[float]
    num_rows: int
    num_sampled: int


def measure_window(folder: Path, *, num_interactions: int) -> WindowRead:
    """Read the newest two thirds of a table in several ways, and their files with pyarrow alone."""
    store = DeltaStore(str(folder / "window"))
    store.create()
    random = np.random.default_rng(1)
    for day, sessions in enumerate((num_interactions // 20, num_interactions // 10)):
        turns = make_turns(
            random,
            num_sessions=sessions,
            turns=10,
            first=day << 32,
            start=days_after(10 * day),
        )
        rows = interactions_table(random, turns, ingest_day=days_after(10 * day))
        for batch in batches(rows, 5_000):
            store.append("interactions", batch)
    num_sampled = int(turns.num_sampled.sum())
    since = days_after(10)
    files = [file for file in _files(store, "interactions") if str(since.date()) in str(file)]
    scope = Scope(since=since)
    ways: dict[str, Callable[[], int]] = {
        "window": lambda: sum(batch.num_rows for batch in read_window(store, scope)),
        "bare": lambda: _read_bare(files),
        "view": lambda: _read_view(store, scope),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(REPEATS + 1):
        for name, way in ways.items():
            took = _timed(way)
            if run:  # the first one warms up
                seconds[name].append(took)
    return WindowRead(
        window=seconds["window"],
        bare=seconds["bare"],
        view=seconds["view"],
        segments=[_timed(lambda: _read_segments(store, scope))],
        num_rows=rows.num_rows,
        num_sampled=num_sampled,
    )


def _read_view(store: DeltaStore, scope: Scope) -> int:
    with connect(store, rewards=REWARDS, scope=scope, limits=LIMITS) as connection:
        sql = f"SELECT * FROM interactions WHERE {scope.condition()}"
        return sum(batch.num_rows for batch in connection.sql(sql).to_arrow_reader(10_000))


def _read_segments(store: DeltaStore, scope: Scope) -> int:
    with connect(store, rewards=REWARDS, scope=scope, limits=StoreConfig()) as connection:
        reader = connection.sql("SELECT * FROM segments").to_arrow_reader(1_000)
        return sum(batch.num_rows for batch in reader)


def _read_bare(files: Sequence[Path]) -> int:
    return sum(
        batch.num_rows
        for file in files
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=10_000)
    )


def _timed(work: Callable[[], int]) -> float:
    start = time.perf_counter()
    assert work() > 0
    return time.perf_counter() - start


def measure_training_read(folder: Path, *, num_sessions: int) -> tuple[float, float]:
    """Median seconds and peak bytes, both per token, of new processes that read a window."""
    store = DeltaStore(str(folder / "training"))
    store.create()
    random = np.random.default_rng(3)
    turns = make_turns(random, num_sessions=num_sessions, turns=10)
    for batch in batches(interactions_table(random, turns, ingest_day=START), 5_000):
        store.append("interactions", batch)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        runs = [pool.apply(_read_training_data, (store.root,)) for _ in range(JOIN_REPEATS)]
    seconds, peaks = zip(*runs, strict=True)
    return statistics.median(seconds), statistics.median(peaks)


def _read_training_data(root: str) -> tuple[float, float]:
    source = DeltaSource(DeltaStore(root), rewards=REWARDS, limits=LIMITS)
    with connect(DeltaStore(root), rewards=REWARDS, limits=LIMITS) as connection:
        rows = [
            WindowRow.model_validate(row)
            for row in connection.sql(_TRAINING_ROWS).to_arrow_table().to_pylist()
        ]
    ones = {row.key: 1.0 for row in rows}
    advantages = Advantages(values=ones, weights=ones, baselines={})
    before, start = _peak_mib(), time.perf_counter()
    segments = source.segments(list(ones), at=source.versions())
    data = build_data(segments, rows=rows, advantages=advantages)
    seconds, num_tokens = time.perf_counter() - start, sum(datum.num_tokens for datum in data)
    return seconds / num_tokens, (_peak_mib() - before) * 2**20 / num_tokens


_TRAINING_ROWS = """
SELECT interaction_id, choice_index, session_id, tenant, 1.0 AS reward, 1 AS version,
  1.0 AS temperature, len(completion_token_ids) AS num_sampled, served_at FROM interactions
"""


def measure_join(folder: Path, *, num_rows: int) -> tuple[float, float]:
    """Median seconds and peak MiB of new processes that join `num_rows` of feedback."""
    store = DeltaStore(str(folder / f"join-{num_rows}"))
    store.create()
    random = np.random.default_rng(2)
    turns = make_turns(
        random, num_sessions=num_rows // 100, turns=10, first_prompt=4, prompt=4, sampled=8
    )
    store.append("interactions", interactions_table(random, turns, ingest_day=START))
    given = feedback_table(random, turns, num_rows=num_rows, ingest_day=START)
    for batch in batches(given, 50_000):
        store.append("feedback", batch)
    # Spawned: a fork would inherit this process's memory, and delta-rs does not survive a fork.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        runs = [pool.apply(_join, (store.root, num_rows // 10)) for _ in range(JOIN_REPEATS)]
    return statistics.median(seconds for seconds, _ in runs), max(peak for _, peak in runs)


def _join(root: str, at_least: int) -> tuple[float, float]:
    start = time.perf_counter()
    with connect(
        DeltaStore(root), rewards=REWARDS, as_of=days_after(365), limits=LIMITS
    ) as connection:
        rewards = connection.sql("SELECT * FROM rewards").to_arrow_table()
    seconds = time.perf_counter() - start
    assert rewards.num_rows > 0.9 * at_least
    return seconds, _peak_mib()


def _peak_mib() -> float:
    """Peak memory of this process, MiB; `ru_maxrss` would include the parent's memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of log seconds over log size, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def draw(
    path: Path, *, storage: Storage, window: WindowRead, join: dict[int, tuple[float, float]]
) -> None:
    """Draw three panels: sizes on disk, reading a window, and joining rewards."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    sizes, reads, joins = figure.subplots(1, 3)
    bars = {
        "this store": storage.table,
        "JSONL": storage.jsonl,
        "JSONL, full\nprompt per turn": storage.per_turn_jsonl,
    }
    drawn = sizes.bar(list(bars), [size / storage.num_sampled for size in bars.values()])
    sizes.bar_label(drawn, fmt="%.1f")
    sizes.set_ylabel("bytes per sampled token, everything stored")
    sizes.margins(y=0.12)
    sizes.set_title("ten-turn sessions on disk")
    drawn = reads.bar(
        ["pyarrow", "read_window", "SQL view"],
        [statistics.median(way) for way in (window.bare, window.window, window.view)],
    )
    reads.bar_label(drawn, fmt="%.2f s")
    reads.margins(y=0.12)
    reads.set_ylabel("seconds")
    reads.set_title(f"window of {window.num_rows:,} interactions")
    rows = list(join)
    joins.loglog(rows, [join[size][0] for size in rows], "o-", label="measured")
    linear = [join[rows[-1]][0] * size / rows[-1] for size in rows]
    joins.loglog(rows, linear, "--", color="gray", label="linear from the largest")
    joins.set_xlabel("feedback rows")
    joins.set_ylabel("seconds")
    joins.set_title("reward join")
    joins.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Measure everything and write `results/store.json` and `results/store.png`."""
    print(METHOD)
    with TemporaryDirectory() as name:
        folder = Path(name)
        storage = measure_storage(folder, num_sessions=500)
        print(storage)
        training = measure_training_read(folder, num_sessions=1_000)
        print(training)
        join = {size: measure_join(folder, num_rows=size) for size in JOIN_SIZES}
        print(join)
        window = measure_window(folder, num_interactions=100_000)
        print(window)
    seconds = [join[size][0] for size in JOIN_SIZES]
    figures = {
        "bytes_per_sampled_token": storage.sampled_columns / storage.num_sampled,
        "ratio_vs_jsonl": storage.jsonl / storage.table,
        "ratio_vs_per_turn_jsonl": storage.per_turn_jsonl / storage.table,
        "window_read_ratio_vs_pyarrow": statistics.median(window.window)
        / statistics.median(window.bare),
        "reward_join_peak_mib": join[JOIN_SIZES[-1]][1],
        "reward_join_s": seconds[-1],
        "scaling_exponent": exponent(JOIN_SIZES, seconds),
        "training_read_us_per_token": training[0] * 1e6,
        "training_read_peak_bytes_per_token": training[1],
    }
    assert all(math.isfinite(value) for value in figures.values())
    series = {
        "storage_bytes": [[name, value] for name, value in vars(storage).items()],
        "window_read_s": [
            ["read_window", *window.window],
            ["pyarrow", *window.bare],
            ["view", *window.view],
            ["segments", *window.segments],
        ],
        "reward_join": [[size, *join[size]] for size in JOIN_SIZES],
    }
    write_result(RESULTS / "store.json", method=METHOD, figures=figures, series=series, notes=NOTES)
    draw(RESULTS / "store.png", storage=storage, window=window, join=join)
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
