"""Measures how fast ingest drains a backlog, compared with a loop that only polls and parses JSON.

`python -m benchmarks.ingest` starts its own broker (Apache Kafka if `ONLINERL_TEST_KAFKA` names a
launcher, else Tansu) and fills it. A bare loop and `onlinerl ingest --once` then drain it
alternately, each in a new process with empty tables.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result import RESULTS, write_result
from onlinerl.ingest.event_log.kafka import checks_crcs
from onlinerl.rollout_store.config import BrokerConfig
from onlinerl.rollout_store.event_log import ensure_topics
from onlinerl.rollout_store.schema import INTERACTIONS_TOPIC
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from tests.brokers import KAFKA_LAUNCHER, Broker, kafka, tansu
from tests.events import completion, interaction

NUM_TEMPLATES = 20_000
NUM_PROMPT_TOKENS, NUM_SAMPLED_TOKENS = 70, 80
TARGET_ROWS_PER_S, TARGET_RATIO, TARGET_RSS_MIB = 5_000, 0.5, 600
METHOD = """\
{broker} on the same machine holds {records} interactions of {size:.0f} bytes (70 prompt and 80
sampled tokens, zstd batches of 512 KiB as the gateway ships them). Alternately, {rounds} times: (a)
a bare kafka-python poll loop that calls json.loads on every value; (b) `onlinerl ingest --once`
into empty tables on local disk, which exist already. Each runs in its own process. The time starts
before the first connection and ends after the last record, for (b) after the last commit. Both
check CRCs: {crcs} (kafka-python needs the package crc32c to do that quickly). rows_per_s and
ratio_vs_bare_loop are medians; each ratio compares two runs that followed each other. rss_peak_mib
is the highest resident size of (b) over all rounds{long}."""


@dataclass(frozen=True)
class Run:
    """One process that drained the backlog."""

    records: int
    seconds: float
    cpu_s: float
    rss_peak_mib: float
    commit_ms: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds


def main() -> None:
    """Measure and write `results/ingest.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, default=1_000_000 if KAFKA_LAUNCHER else 0)
    parser.add_argument("--out", type=Path, default=RESULTS / "ingest.json")
    parser.add_argument("--drain", choices=("bare", "ingest"), help=argparse.SUPPRESS)
    parser.add_argument("--bootstrap", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drain:
        drain = drain_bare if arguments.drain == "bare" else drain_into_tables
        run = drain(arguments.bootstrap, arguments.folder)
        print(json.dumps(run.__dict__))
        return
    with tempfile.TemporaryDirectory() as folder:
        start = kafka if KAFKA_LAUNCHER else tansu
        with start(Path(folder)) as broker:
            measure(broker, Path(folder), arguments)


def measure(broker: Broker, folder: Path, arguments: argparse.Namespace) -> None:
    """Fill the broker, drain it alternately, and report."""
    templates = make_templates()
    fill(broker.bootstrap, templates, range(arguments.records))
    bare: list[Run] = []
    ours: list[Run] = []
    for number in range(arguments.rounds):
        bare.append(in_a_process("bare", broker, folder / f"bare{number}"))
        ours.append(in_a_process("ingest", broker, folder / f"tables{number}"))
        rates = f"bare {bare[-1].rate:,.0f}/s, ingest {ours[-1].rate:,.0f}/s"
        print(f"round {number}: {rates}, {ours[-1].rss_peak_mib:.0f} MiB", flush=True)
        check(folder / f"tables{number}", arguments.records)
    long = []
    if arguments.long > arguments.records:
        fill(broker.bootstrap, templates, range(arguments.records, arguments.long))
        long = [in_a_process("ingest", broker, folder / "tables of the long run")]
        check(folder / "tables of the long run", arguments.long)
        print(f"long: ingest {long[0].rate:,.0f}/s, {long[0].rss_peak_mib:.0f} MiB", flush=True)
    size = statistics.mean(map(len, templates))
    report(bare, ours, long, arguments=arguments, size=size)


def report(
    bare: list[Run], ours: list[Run], long: list[Run], *, arguments: argparse.Namespace, size: float
) -> None:
    """Print and write the figures."""
    figures = {
        "rows_per_s": statistics.median(run.rate for run in ours),
        "ratio_vs_bare_loop": statistics.median(
            mine.rate / other.rate for mine, other in zip(ours, bare, strict=True)
        ),
        "rss_peak_mib": max(run.rss_peak_mib for run in [*ours, *long]),
        "bare_loop_per_s": statistics.median(run.rate for run in bare),
        "cpu_us_per_row": statistics.median(run.cpu_s / run.records for run in ours) * 1e6,
        "commit_ms_p50": statistics.median(ms for run in ours for ms in run.commit_ms),
        "commit_ms_max": max(ms for run in [*ours, *long] for ms in run.commit_ms),
    }
    if long:
        figures |= {"long_run_records": long[0].records, "long_run_rows_per_s": long[0].rate}
    crcs = "yes" if checks_crcs("auto") else "no"
    more = f" and of one more drain of {arguments.long} records" if long else ""
    method = METHOD.format(
        broker="Apache Kafka" if KAFKA_LAUNCHER else "Tansu (log in memory)",
        records=arguments.records,
        rounds=arguments.rounds,
        size=size,
        crcs=crcs,
        long=more,
    )
    missed = [
        f"{name} is {figures[name]:.2f}, not {wanted}"
        for name, wanted, is_met in (
            ("rows_per_s", f">= {TARGET_ROWS_PER_S}", figures["rows_per_s"] >= TARGET_ROWS_PER_S),
            (
                "ratio_vs_bare_loop",
                f">= {TARGET_RATIO}",
                figures["ratio_vs_bare_loop"] >= TARGET_RATIO,
            ),
            ("rss_peak_mib", f"< {TARGET_RSS_MIB}", figures["rss_peak_mib"] < TARGET_RSS_MIB),
        )
        if not is_met
    ]
    load = os.getloadavg()[0]
    notes = (
        f"Broker: {'Apache Kafka' if KAFKA_LAUNCHER else 'Tansu'}. After each drain the rows were "
        f"counted, each id once. Load average at the end {load:.1f} on {os.cpu_count()} cores, "
        f"which broker and readers share. {'; '.join(missed) or 'All targets reached.'}"
    )
    write_result(
        arguments.out,
        method=method.replace("\n", " "),
        figures=figures,
        series={
            "bare": [run.__dict__ for run in bare],
            "ingest": [run.__dict__ | {"commit_ms": []} for run in [*ours, *long]],
        },
        notes=notes,
    )
    print(method, *(f"{name}: {value:,.2f}" for name, value in figures.items()), notes, sep="\n")


def in_a_process(what: str, broker: Broker, folder: Path) -> Run:
    """Drain the backlog in a new process; `what` is `bare` or `ingest`."""
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.ingest", "--drain", what]
    command += ["--bootstrap", broker.bootstrap, "--folder", str(folder)]
    done = subprocess.run(command, check=True, timeout=900, stdout=subprocess.PIPE)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def drain_bare(bootstrap: str, folder: Path) -> Run:
    """Poll to the end and parse every value, with a consumer configured like that of ingest."""
    from kafka import KafkaConsumer, TopicPartition

    started, cpu = time.perf_counter(), time.process_time()
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="none",
        check_crcs=checks_crcs("auto"),
        max_poll_records=4_000,
        fetch_max_bytes=16 * 1024**2,
        max_partition_fetch_bytes=8 * 1024**2,
    )
    partition = TopicPartition(INTERACTIONS_TOPIC, 0)
    consumer.assign([partition])
    consumer.seek(partition, 0)
    count = 0
    while consumer.highwater(partition) is None or count < consumer.highwater(partition):
        for batch in consumer.poll(500).values():
            for record in batch:
                json.loads(record.value)
            count += len(batch)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    consumer.close(autocommit=False)
    return Run(count, seconds, cpu_s, rss_peak_mib())


def drain_into_tables(bootstrap: str, folder: Path) -> Run:
    """Run `onlinerl ingest --once` and time it and its commits."""
    from onlinerl.ingest.main import run_ingest
    from onlinerl.settings import load

    commits: list[float] = []
    append = DeltaStore.append

    def timed(self: DeltaStore, *args: Any, **options: Any) -> int:  # noqa: ANN401 - passed on
        began = time.perf_counter()
        version = append(self, *args, **options)
        commits.append((time.perf_counter() - began) * 1000)
        return version

    patched: Any = DeltaStore
    patched.append = timed
    (folder / "onlinerl.toml").write_text(
        f'data_dir = "."\npolicy.base_model = "."\nbroker.bootstrap = "{bootstrap}"\n'
        "broker.embedded = false\ningest.health_port = 0\n"
    )
    settings = load(folder / "onlinerl.toml")
    DeltaStore(settings.store_root).create()
    started, cpu = time.perf_counter(), time.process_time()
    run_ingest(settings, once=True)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return Run(count_rows(settings.store_root), seconds, cpu_s, rss_peak_mib(), tuple(commits))


def count_rows(root: str) -> int:
    """Number of rows in the table `interactions`, from its log."""
    actions = DeltaStore(root).delta("interactions").get_add_actions(flatten=True)
    return sum(actions["num_records"].to_pylist())


def check(folder: Path, expected: int) -> None:
    """Assert that every record is in the table exactly once."""
    ids = DeltaStore(str(folder / "store")).dataset("interactions").to_table(["interaction_id"])
    num_ids = len(ids["interaction_id"].unique())
    assert (ids.num_rows, num_ids) == (expected, expected), f"{ids.num_rows} rows, {num_ids} ids"


def rss_peak_mib() -> float:
    """Highest resident size of this process so far, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmHWM in /proc/self/status")


def make_templates() -> list[bytes]:
    """Events with random tokens; `ship` replaces the first 8 digits of their ids."""
    rng = np.random.default_rng(0)
    return [
        interaction(
            f"00000000-7000-8000-{number:012x}",
            session_id=f"session-{number // 5}",
            prompt_token_ids=rng.integers(0, 50_000, NUM_PROMPT_TOKENS).tolist(),
            user=f"{number % 1000:032x}",
            ttft_ms=12.5,
            latency_ms=456.75,
            tags={"app": "chat"},
            choices=[
                completion(
                    rng.integers(0, 50_000, NUM_SAMPLED_TOKENS).tolist(),
                    logprobs=(-rng.exponential(0.7, NUM_SAMPLED_TOKENS)).tolist(),
                )
            ],
        )
        .model_dump_json()
        .encode()
        for number in range(NUM_TEMPLATES)
    ]


def fill(bootstrap: str, templates: list[bytes], numbers: range) -> None:
    """Produce an event per number, as the gateway does, from two processes."""
    ensure_topics(BrokerConfig(bootstrap=bootstrap))
    began = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    children = [
        spawn.Process(target=ship, args=(bootstrap, templates, numbers[half::2]))
        for half in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(900)
        assert child.exitcode == 0, "a producer failed"
    rate = len(numbers) / (time.perf_counter() - began)
    print(f"filled {len(numbers)} records, {rate:,.0f}/s", flush=True)


def ship(bootstrap: str, templates: list[bytes], numbers: range) -> None:
    """Produce events with distinct ids, with a bound on those that are not acknowledged yet."""
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=bootstrap, compression_type="zstd", linger_ms=20, batch_size=512 * 1024
    )
    room = threading.Semaphore(20_000)
    for number in numbers:
        template = templates[number % len(templates)]
        value = template.replace(b'"00000000-', b'"%08x-' % (number // len(templates)), 1)
        assert room.acquire(timeout=60), "the broker does not acknowledge"
        producer.send(INTERACTIONS_TOPIC, value).add_both(lambda _: room.release())
    producer.flush(60)
    producer.close(10)


if __name__ == "__main__":
    main()
