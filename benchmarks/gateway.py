"""Cost and capacity of the gateway: `make bench NAME=gateway` (about eight minutes on two cores).

Measures latency and throughput in front of an engine that replays recorded chunks, compared with
the engine without a gateway and with the LiteLLM proxy; latency while the broker hangs; 512 streams
at once; and, on a real engine, how much of a conversation's prompt is in the prefix cache.
"""

import asyncio
import contextlib
import statistics
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks import conversations
from benchmarks.load import Timings, chat_target, percentile, run
from benchmarks.processes import (
    Running,
    gateway,
    litellm,
    litellm_version,
    logged_ids,
    mock_engine,
    wait_until_shipped,
)
from benchmarks.result import RESULTS, write_result
from tests.brokers import Broker, tansu
from tests.models import smollm2

METHOD = """\
One machine; load generator, engine, gateway, broker (Tansu) and proxy share its cores. The engine
replays a recorded 100-token answer of vLLM, chunk by chunk without delay: the worst case, because
no work of the gateway is hidden behind a decoding step. Added latency: the median (and 99th
percentile) through the gateway minus that of the engine's own chat route, one request at a time,
{rounds} rounds of {requests} requests, alternating between all targets. Requests per second: 16 at
once, alternating in the same way. Sink dead: the broker is stopped (SIGSTOP) in every other round.
512 streams: {streams} requests; memory is the growth of the gateway's resident size after warming
up, rows are distinct ids read back from the broker. Prefix cache: {conversations} conversations of
ten turns with SmolLM2-135M-Instruct, {turn_tokens} sampled tokens per turn, temperature 0.7,
counters of vLLM. Extension rate: share of turns whose prompt begins with the exact tokens of the
turn before, in the gateway and in transformers' chat template."""
ROUNDS = 7
REQUESTS = 60
C16_REQUESTS = 320
SINK_REQUESTS = 800
STREAM_REQUESTS = 10_000

console = Console()


def measure(
    urls: dict[str, str], *, requests: int, concurrency: int, rounds: int = ROUNDS
) -> dict[str, Timings]:
    """Time all targets alternately; returns the timings by `<target>.<unary or stream>`."""
    targets = [
        chat_target(f"{name}.{'stream' if stream else 'unary'}", url, stream=stream)
        for name, url in urls.items()
        for stream in (False, True)
    ]
    timings = {target.name: Timings() for target in targets}
    for target in targets:
        asyncio.run(run(target, num_requests=20, concurrency=min(concurrency, 4)))
    for _ in track(range(rounds), f"{concurrency} at once", console=console):
        for target in targets:
            timings[target.name].add(
                asyncio.run(run(target, num_requests=requests, concurrency=concurrency))
            )
    for name, of_target in timings.items():
        assert not of_target.errors, (name, of_target.errors[:3])
    return timings


def added_ms(timings: dict[str, Timings], target: str, kind: str, share: float) -> float:
    """A percentile of a target's latency minus that of the engine itself, milliseconds."""
    through, direct = timings[f"{target}.{kind}"], timings[f"direct.{kind}"]
    return percentile(through.total_ms, share) - percentile(direct.total_ms, share)


def latency_figures(one: dict[str, Timings], many: dict[str, Timings]) -> dict[str, float]:
    """The figures about latency and throughput, by key."""
    first = statistics.median(one["gateway.stream"].first_ms)
    return {
        "unary_added_p50_ms": added_ms(one, "gateway", "unary", 0.5),
        "unary_added_p99_ms": added_ms(one, "gateway", "unary", 0.99),
        "stream_added_p50_ms": added_ms(one, "gateway", "stream", 0.5),
        "first_token_added_p50_ms": first - statistics.median(one["direct.stream"].first_ms),
        "litellm_unary_added_p50_ms": added_ms(one, "litellm", "unary", 0.5),
        "litellm_stream_added_p50_ms": added_ms(one, "litellm", "stream", 0.5),
        "rps_ratio_vs_litellm_unary_c16": many["gateway.unary"].per_s / many["litellm.unary"].per_s,
        "rps_ratio_vs_litellm_stream_c16": many["gateway.stream"].per_s
        / many["litellm.stream"].per_s,
    }


def series_rows(timings: dict[str, Timings], *, concurrency: int) -> list[dict[str, object]]:
    """Percentiles of every target, for the series of the result."""
    return [
        {
            "target": name,
            "concurrency": concurrency,
            "p50_ms": round(percentile(of_target.total_ms, 0.5), 3),
            "p99_ms": round(percentile(of_target.total_ms, 0.99), 3),
            "first_p50_ms": round(percentile(of_target.first_ms, 0.5), 3),
            "per_s": round(of_target.per_s, 1),
        }
        for name, of_target in timings.items()
    ]


def sink_dead_ratio(served: Running, broker: Broker) -> float:
    """99th percentile of latency with a stopped broker divided by that with a working one."""
    target = chat_target("gateway.stream", served.url, stream=True)
    healthy, dead = Timings(), Timings()
    for _ in track(range(4), "sink dead", console=console):
        wait_until_shipped(served)
        healthy.add(asyncio.run(run(target, num_requests=SINK_REQUESTS, concurrency=16)))
        broker.freeze()
        try:
            dead.add(asyncio.run(run(target, num_requests=SINK_REQUESTS, concurrency=16)))
        finally:
            broker.thaw()
    assert not healthy.errors, healthy.errors[:3]
    assert not dead.errors, dead.errors[:3]
    return percentile(dead.total_ms, 0.99) / percentile(healthy.total_ms, 0.99)


@contextlib.contextmanager
def sample_memory(served: Running, samples: list[float]) -> Iterator[None]:
    """Append the resident size in MiB to `samples` four times a second."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.25):
            samples.append(served.rss_mib())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def streams512(served: Running, broker: Broker) -> dict[str, float]:
    """Errors, lost rows, memory and rate of 10,000 requests, of which 512 stream at once."""
    target = chat_target("gateway.stream", served.url, stream=True)
    asyncio.run(run(target, num_requests=512, concurrency=64))
    before, samples = served.rss_mib(), list[float]()
    console.print("512 streams at once ...")
    with sample_memory(served, samples):
        timings = asyncio.run(run(target, num_requests=STREAM_REQUESTS, concurrency=512))
    wait_until_shipped(served)
    logged = set(logged_ids(broker.bootstrap))
    return {
        "streams512_errors": len(timings.errors),
        "streams512_rows_lost": sum(each not in logged for each in timings.ids),
        "streams512_rss_growth_mib": max(samples) - before,
        "streams512_per_s": timings.per_s,
    }


def main() -> None:
    """Measure, print and write `results/gateway.json`."""
    model = smollm2()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tansu(folder) as broker, mock_engine() as engine:
            start_gateway = partial(
                gateway, engine=engine.url, bootstrap=broker.bootstrap, model=model
            )
            with start_gateway(folder) as served, litellm(folder, engine=engine.url) as proxy:
                urls = {"direct": engine.url, "gateway": served.url, "litellm": proxy.url}
                one = measure(urls, requests=REQUESTS, concurrency=1)
                many = measure(urls, requests=C16_REQUESTS, concurrency=16, rounds=3)
                version = litellm_version()
            figures |= latency_figures(one, many)
            console.print_json(data=figures)
            (folder / "again").mkdir()
            with start_gateway(folder / "again") as served:
                figures["p99_ratio_sink_dead"] = sink_dead_ratio(served, broker)
                figures |= streams512(served, broker)
        figures |= conversations.measure(folder, model=model, console=console)
    console.print_json(data=figures)
    write_result(
        RESULTS / "gateway.json",
        method=METHOD.format(
            rounds=ROUNDS,
            requests=REQUESTS,
            streams=STREAM_REQUESTS,
            conversations=conversations.NUM_CONVERSATIONS,
            turn_tokens=conversations.TURN_TOKENS,
        ).replace("\n", " "),
        figures=figures,
        series={"targets": series_rows(one, concurrency=1) + series_rows(many, concurrency=16)},
        notes=f"LiteLLM {version}, one worker. {notes(figures)}",
    )


def notes(figures: dict[str, float]) -> str:
    """A sentence about the targets that were not reached."""
    third = figures["litellm_unary_added_p50_ms"] / 3
    targets = {
        "unary_added_p50_ms": (figures["unary_added_p50_ms"] <= 2, "at most 2"),
        "unary_added_p99_ms": (figures["unary_added_p99_ms"] <= 10, "at most 10"),
        "first_token_added_p50_ms": (figures["first_token_added_p50_ms"] <= 3, "at most 3"),
        "litellm_unary_added_p50_ms": (
            figures["unary_added_p50_ms"] <= third,
            "at least three times ours",
        ),
        "rps_ratio_vs_litellm_unary_c16": (
            figures["rps_ratio_vs_litellm_unary_c16"] >= 3,
            "at least 3",
        ),
        "rps_ratio_vs_litellm_stream_c16": (
            figures["rps_ratio_vs_litellm_stream_c16"] >= 3,
            "at least 3",
        ),
        "p99_ratio_sink_dead": (figures["p99_ratio_sink_dead"] <= 1.1, "at most 1.1"),
        "streams512_errors": (figures["streams512_errors"] == 0, "0"),
        "streams512_rows_lost": (figures["streams512_rows_lost"] == 0, "0"),
        "streams512_rss_growth_mib": (figures["streams512_rss_growth_mib"] < 200, "below 200"),
        "prefix_cache_hit_ratio": (figures["prefix_cache_hit_ratio"] >= 0.85, "at least 0.85"),
        "extension_rate": (figures["extension_rate"] == 1, "1"),
    }
    missed = [f"{key} ({wanted})" for key, (reached, wanted) in targets.items() if not reached]
    return f"Not reached: {', '.join(missed)}." if missed else "Every target was reached."


if __name__ == "__main__":
    main()
