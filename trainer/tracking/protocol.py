"""What a cycle tells the experiment tracker, and an in-memory twin for tests."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from typing_extensions import override

RunStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]


class RunTracker(Protocol):
    """Runs with parameters, metrics over steps, tags and artifacts.

    Every method may raise ServiceUnavailable.
    """

    def start(self, name: str, *, tags: Mapping[str, str], params: Mapping[str, str]) -> str:
        """Open a run and return its id."""
        ...

    def supersede(self, cycle_id: str) -> None:
        """Close runs that an earlier attempt at the cycle left open, as KILLED."""
        ...

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], *, step: int) -> None:
        """Add one point to each metric."""
        ...

    def log_folder(self, run_id: str, folder: Path, *, artifact_path: str) -> None:
        """Upload the files of a folder; files of the same path are replaced."""
        ...

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Add or replace tags of the run."""
        ...

    def finish(self, run_id: str, *, status: RunStatus) -> None:
        """Close the run."""
        ...


@dataclass
class MemoryRun:
    """A run of the twin."""

    name: str
    tags: dict[str, str]
    params: dict[str, str]
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    status: RunStatus = "RUNNING"


@dataclass
class MemoryTracker(RunTracker):
    """A RunTracker that keeps artifacts in folders below `root`, one for each run."""

    root: Path
    runs: dict[str, MemoryRun] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)
    """Folder of the artifacts of each run, by run id."""

    @override
    def start(self, name: str, *, tags: Mapping[str, str], params: Mapping[str, str]) -> str:
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = MemoryRun(name, dict(tags), dict(params))
        self.artifacts[run_id] = self.root / run_id
        return run_id

    @override
    def supersede(self, cycle_id: str) -> None:
        for run in self.runs.values():
            if run.tags.get("onlinerl.cycle") == cycle_id and run.status == "RUNNING":
                run.status = "KILLED"

    @override
    def log_metrics(self, run_id: str, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self.runs[run_id].metrics.setdefault(name, []).append((step, value))

    @override
    def log_folder(self, run_id: str, folder: Path, *, artifact_path: str) -> None:
        shutil.copytree(folder, self.artifacts[run_id] / artifact_path, dirs_exist_ok=True)

    @override
    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.runs[run_id].tags.update(tags)

    @override
    def finish(self, run_id: str, *, status: RunStatus) -> None:
        self.runs[run_id].status = status
