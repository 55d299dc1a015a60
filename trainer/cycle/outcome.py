"""The outcome of a trained cycle on the local disk, from which it is registered.

`cycles/<cycle_id>/` holds `checkpoint/` (the weights to serve), `figures/`, `lineage/`, `config/`
and `outcome.json`. The folder appears by a rename, so it is complete or missing.
"""

import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict

CYCLES = "cycles"
UPLOADED = ("figures", "lineage", "config", "checkpoint")
"""Subfolders that become artifacts of the run, the weights last."""


class Outcome(BaseModel):
    """Content of `outcome.json`: the results of training that registering needs."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    """MLflow run that the training logged to."""
    description: str
    """Description of the version, Markdown."""
    baselines: dict[str, float]
    """Mean rewards by tenant after this cycle."""
    steps: list[dict[str, float]]
    """Metrics of every measured step."""
    stopped: str | None
    """Why the cycle ended before its last planned step."""


def outcome_folder(root: Path, cycle_id: str) -> Path:
    """The folder of a cycle's outcome below the trainer's folder `root`."""
    return root / CYCLES / cycle_id


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write `outcome.json` into a folder that is being filled."""
    (folder / "outcome.json").write_text(outcome.model_dump_json(indent=1), encoding="utf-8")


def read_outcome(root: Path, cycle_id: str) -> Outcome:
    """The outcome of a trained cycle."""
    file = outcome_folder(root, cycle_id) / "outcome.json"
    return Outcome.model_validate_json(file.read_text(encoding="utf-8"))


def forget_old_outcomes(root: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` folders; the registry has copies of them."""
    folders = sorted((root / CYCLES).iterdir(), key=lambda folder: folder.stat().st_mtime)
    for folder in folders[:-keep]:
        shutil.rmtree(folder)
