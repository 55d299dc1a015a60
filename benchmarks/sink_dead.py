"""Ten minutes without a broker, under load: `make bench NAME=sink_dead` (about 17 minutes).

Measures latency and memory of the gateway before, while and after the broker hangs.
"""

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from benchmarks.load import Timings, chat_target, percentile, run
from benchmarks.processes import (
    Running,
    gateway,
    logged_ids,
    mock_engine,
    wait_until_shipped,
)
from benchmarks.result import RESULTS, write_result
from tests.brokers import tansu
from tests.models import smollm2

METHOD = """\
One machine; load generator, engine, gateway and broker (Tansu) share its cores. {concurrency}
callers request streamed answers of 100 tokens without pause, which the engine replays with a pause
of {step_ms:g} ms between chunks. The broker works for {healthy_s:g} s, hangs (SIGSTOP) for
{dead_s:g} s, and works again for {healthy_s:g} s while waiting events are shipped; then the load
ends and the spool empties. Ratios compare all requests of the dead time, or of its last two
minutes, with those of the healthy time before. Memory is the growth of the gateway's resident size
over the dead time. Rows missing: ids of answers that are not in the topic at the end."""
CONCURRENCY = 32
STEP_S = 0.002
HEALTHY_S = 120.0
DEAD_S = 600.0
WARM_UP_S = 60.0
"""Seconds of load before the measurement, in which the gateway's memory of conversations fills."""
ROUND_REQUESTS = 640

console = Console()


@dataclass(frozen=True, kw_only=True)
class Round:
    """A few seconds of load."""

    phase: str
    ended_s: float
    """Seconds since the load began."""
    timings: Timings
    rss_mib: float
    backlog_mib: float


def rounds(served: Running, phase: str, *, seconds: float, began: float) -> list[Round]:
    """Load the gateway for `seconds`, in rounds of a few seconds."""
    target = chat_target("gateway.stream", served.url, stream=True)
    done: list[Round] = []
    until = time.monotonic() + seconds
    with Progress(console=console) as progress:
        task = progress.add_task(phase, total=seconds)
        while (left := until - time.monotonic()) > 0:
            progress.update(task, completed=seconds - left)
            timings = asyncio.run(run(target, num_requests=ROUND_REQUESTS, concurrency=CONCURRENCY))
            backlog = json.loads(served.get("/health/ready"))["backlog_bytes"]
            done.append(
                Round(
                    phase=phase,
                    ended_s=time.monotonic() - began,
                    timings=timings,
                    rss_mib=served.rss_mib(),
                    backlog_mib=backlog / 2**20,
                )
            )
    return done


def together(some: list[Round]) -> Timings:
    """The timings of all requests of some rounds."""
    timings = Timings()
    for each in some:
        timings.add(each.timings)
    return timings


def main() -> None:
    """Measure, print, and write `results/sink_dead.json` and `.png`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            tansu(folder) as broker,
            mock_engine(step_s=STEP_S) as engine,
            gateway(
                folder, engine=engine.url, bootstrap=broker.bootstrap, model=smollm2()
            ) as served,
        ):
            began = time.monotonic()
            warm = rounds(served, "warm-up", seconds=WARM_UP_S, began=began)
            before = rounds(served, "healthy", seconds=HEALTHY_S, began=began)
            rss_before = served.rss_mib()
            broker.freeze()
            dead = rounds(served, "dead", seconds=DEAD_S, began=began)
            rss_after = served.rss_mib()
            broker.thaw()
            after = rounds(served, "back", seconds=HEALTHY_S, began=began)
            wait_until_shipped(served, timeout_s=600)
            everything = together([*warm, *before, *dead, *after])
            lost = served.metric("onlinerl_gateway_events_lost_total")
            logged = set(logged_ids(broker.bootstrap, timeout_s=600))
    last = [each for each in dead if each.ended_s > dead[-1].ended_s - 120]
    healthy_ms = together(before).total_ms
    figures = {
        "p50_ratio_sink_dead": percentile(together(dead).total_ms, 0.5)
        / percentile(healthy_ms, 0.5),
        "p99_ratio_sink_dead": percentile(together(dead).total_ms, 0.99)
        / percentile(healthy_ms, 0.99),
        "p99_ratio_last_two_minutes": percentile(together(last).total_ms, 0.99)
        / percentile(healthy_ms, 0.99),
        "rss_growth_mib": rss_after - rss_before,
        "backlog_peak_mib": max(each.backlog_mib for each in [*dead, *after]),
        "requests": len(everything.total_ms),
        "errors": len(everything.errors),
        "events_lost": lost,
        "rows_missing": sum(each not in logged for each in everything.ids),
    }
    console.print_json(data=figures)
    draw([*warm, *before, *dead, *after], RESULTS / "sink_dead.png")
    write_result(
        RESULTS / "sink_dead.json",
        method=METHOD.format(
            concurrency=CONCURRENCY, step_ms=STEP_S * 1000, healthy_s=HEALTHY_S, dead_s=DEAD_S
        ).replace("\n", " "),
        figures=figures,
        series={"rounds": [series_row(each) for each in [*warm, *before, *dead, *after]]},
        notes=notes(figures),
    )


def series_row(each: Round) -> dict[str, object]:
    """A round, for the series of the result."""
    return {
        "phase": each.phase,
        "ended_s": round(each.ended_s, 1),
        "p50_ms": round(percentile(each.timings.total_ms, 0.5), 2),
        "p99_ms": round(percentile(each.timings.total_ms, 0.99), 2),
        "rss_mib": round(each.rss_mib, 1),
        "backlog_mib": round(each.backlog_mib, 1),
    }


def draw(load: list[Round], path: Path) -> None:
    """Draw latency, memory and backlog over time, with the dead time in grey."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    at_s = [each.ended_s for each in load]
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        upper.plot(at_s, [percentile(e.timings.total_ms, share) for e in load], label=label)
    upper.set(ylabel="latency of an answer, ms", ylim=(0, None))
    lower.plot(at_s, [each.rss_mib for each in load], label="resident memory of the gateway")
    lower.plot(at_s, [each.backlog_mib for each in load], label="events waiting on disk")
    lower.set(xlabel="seconds", ylabel="MiB", ylim=(0, None))
    dead_s = [each.ended_s for each in load if each.phase == "dead"]
    for axes in (upper, lower):
        axes.axvspan(dead_s[0], dead_s[-1], color="0.9", label="broker hangs")
        axes.legend()
    figure.savefig(path, dpi=120)


def notes(figures: dict[str, float]) -> str:
    """A sentence about the targets that were not reached."""
    targets = {
        "p99_ratio_sink_dead": (figures["p99_ratio_sink_dead"] <= 1.1, "at most 1.1"),
        "errors": (figures["errors"] == 0, "0"),
        "events_lost": (figures["events_lost"] == 0, "0"),
        "rows_missing": (figures["rows_missing"] == 0, "0"),
    }
    missed = [f"{key} ({wanted})" for key, (reached, wanted) in targets.items() if not reached]
    return f"Not reached: {', '.join(missed)}." if missed else "Every target was reached."


if __name__ == "__main__":
    main()
