"""What a trained cycle leaves on the local disk until it is registered, and a little longer.

`cycles/<cycle_id>/` holds `checkpoint/` (what will be served), `figures/`, `lineage/`, `config/`
and `outcome.json`. The folder appears by a rename, so it is there whole or not at all.
"""

import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict

CYCLES = "cycles"
UPLOADED = ("figures", "lineage", "config", "checkpoint")
"""Subfolders that become artifacts of the run, the weights last."""


class Outcome(BaseModel):
    """Content of `outcome.json`: what registering needs to know of the training."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    """MLflow run that the training logged to."""
    description: str
    """Of the version, Markdown."""
    baselines: dict[str, float]
    """Mean rewards by tenant after this cycle."""
    steps: list[dict[str, float]]
    """Metrics of every measured step."""
    stopped: str | None
    """Why the cycle ended before its last planned step."""


def outcome_folder(root: Path, cycle_id: str) -> Path:
    """Where the outcome of a cycle lies."""
    return root / CYCLES / cycle_id


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Into a folder that is not yet in its place."""
    (folder / "outcome.json").write_text(outcome.model_dump_json(indent=1), encoding="utf-8")


def read_outcome(root: Path, cycle_id: str) -> Outcome:
    """Of a cycle that is trained."""
    file = outcome_folder(root, cycle_id) / "outcome.json"
    return Outcome.model_validate_json(file.read_text(encoding="utf-8"))


def forget_old_outcomes(root: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` folders; the registry has what they hold."""
    folders = sorted((root / CYCLES).iterdir(), key=lambda folder: folder.stat().st_mtime)
    for folder in folders[:-keep]:
        shutil.rmtree(folder)
