"""Measures how much CPU an engine leaves to others: `make bench NAME=engine_waiting` (ten minutes).

vLLM's processes wait for each other by polling shared memory without a pause. The plugin's
`cpu_waiting` pauses between two polls. Both ways are measured beside a process that uses one core.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.processes import Running, server
from benchmarks.result import RESULTS, write_result
from tests.brokers import free_port
from tests.models import tiny_model

METHOD = """\
vLLM serves a model of a few layers with random weights, with the plugin of onlinerl and without it
(VLLM_PLUGINS), {rounds} times alternately, in a new process each time. Two callers request 200
tokens without pause, {load_s:g} s alone and {load_s:g} s beside a neighbour, which is one Python
process that counts. answers_ratio_*: answers per second with pauses divided by those without.
neighbour_*: the neighbour's count divided by its count on the idle machine. Medians over the
rounds."""
ROUNDS = 3
LOAD_S = 15.0
COUNT = """
import sys, time
until, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < until:
    count += sum(range(1000)) > 0
print(count)
"""

console = Console()


@contextlib.contextmanager
def engine(model: Path, *, with_pauses: bool) -> Iterator[Running]:
    """An engine without a gateway, with our plugin or without any."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--max-model-len", "512", "--max-num-seqs", "8"]
    environment = {
        "VLLM_PLUGINS": "onlinerl" if with_pauses else "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with server(command, port=port, path="/health", env=environment, timeout_s=300) as running:
        yield running


def answers_per_s(served: Running, model: Path) -> float:
    """Answers per second to two callers who ask without pause."""
    until, counts = time.monotonic() + LOAD_S, [0, 0]
    body = {"model": str(model), "prompt": "Once", "max_tokens": 200, "ignore_eos": True}

    def ask(caller: int) -> None:
        while time.monotonic() < until:
            request = urllib.request.Request(
                f"{served.url}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                response.read()
            counts[caller] += 1

    threads = [threading.Thread(target=ask, args=(caller,)) for caller in range(2)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - began)


def neighbour() -> "subprocess.Popen[str]":
    """Start a process that counts for `LOAD_S`."""
    command = [sys.executable, "-c", COUNT, str(LOAD_S)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def final_count(process: "subprocess.Popen[str]") -> int:
    """Wait for a neighbour to end; returns its count."""
    return int(process.communicate(timeout=10 * LOAD_S)[0])


def measure(model: Path, *, with_pauses: bool) -> dict[str, float]:
    """Measure one engine, alone and beside a neighbour."""
    idle = final_count(neighbour())
    with engine(model, with_pauses=with_pauses) as served:
        answers_per_s(served, model)  # warm
        alone = answers_per_s(served, model)
        beside = neighbour()
        shared = answers_per_s(served, model)
        count = final_count(beside)
    return {"alone_per_s": alone, "shared_per_s": shared, "neighbour": count / idle}


def main() -> None:
    """Measure, print and write `results/engine_waiting.json`."""
    model = tiny_model()
    rows: list[dict[str, object]] = []
    medians: dict[bool, dict[str, float]] = {}
    by_way: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for number in range(ROUNDS):
        for with_pauses in (False, True):
            figures = measure(model, with_pauses=with_pauses)
            by_way[with_pauses].append(figures)
            rows.append({"round": number, "with_pauses": with_pauses, **figures})
            console.print(rows[-1])
    for with_pauses, each in by_way.items():
        medians[with_pauses] = {
            key: statistics.median(figures[key] for figures in each) for key in each[0]
        }
    with_, without = medians[True], medians[False]
    figures = {
        "answers_ratio_alone": with_["alone_per_s"] / without["alone_per_s"],
        "answers_ratio_beside_a_neighbour": with_["shared_per_s"] / without["shared_per_s"],
        "neighbour_with_pauses": with_["neighbour"],
        "neighbour_without": without["neighbour"],
    }
    console.print_json(data=figures)
    write_result(
        RESULTS / "engine_waiting.json",
        method=METHOD.format(rounds=ROUNDS, load_s=LOAD_S).replace("\n", " "),
        figures=figures,
        series={"rounds": rows},
        notes="There is no target; the figures justify the pauses of the plugin.",
    )


if __name__ == "__main__":
    main()
