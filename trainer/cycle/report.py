"""Reports of a cycle: metrics of its window, lineage, tags and description of its version."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from onlinerl.registry.version import CYCLE, PARENT, REVIEW
from onlinerl.trainer.bookkeeping.plan import Plan
from onlinerl.trainer.rollouts.advantages import Advantages
from onlinerl.trainer.rollouts.rows import served_range
from onlinerl.trainer.training.loop import History

SHOWN = (
    ("ratio/k3", "k3 to the serving policy, nats per token"),
    ("ratio/ess", "effective share of tokens"),
    ("kl_base", "KL to the base model, nats per token"),
    ("entropy", "entropy, nats per token"),
    ("masked_share", "share of tokens without a gradient"),
)


def window_metrics(plan: Plan) -> dict[str, float]:
    """Metrics of the window, which do not change over steps."""
    rewards = np.array([row.reward for row in plan.rows])
    lengths = np.array([row.num_sampled for row in plan.rows])
    counts = {f"window/excluded_{name}": float(count) for name, count in plan.excluded.items()}
    return counts | {
        "window/rows": float(len(plan.rows)),
        "window/sessions": float(len({row.session for row in plan.rows})),
        "window/reward_mean": float(rewards.mean()),
        "window/reward_std": float(rewards.std()),
        "window/positive_share": float((rewards > 0).mean()),
        "window/length_mean": float(lengths.mean()),
        "window/length_median": float(np.median(lengths)),
        "window/fresh_share": float(
            np.mean([row.version == plan.parent_version for row in plan.rows])
        ),
    }


def write_lineage(folder: Path, *, plan: Plan, advantages: Advantages) -> None:
    """Write `interactions.parquet`: every row of the window with its advantage and weight."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = [
        row.model_dump()
        | {"advantage": advantages.values[row.key], "weight": advantages.weights[row.key]}
        for row in plan.rows
    ]
    pq.write_table(pa.Table.from_pylist(columns), folder / "interactions.parquet")


def write_config(folder: Path, *, plan: Plan) -> None:
    """Write `config.json`: the plan without its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    content = plan.model_dump(mode="json", exclude={"rows"})
    (folder / "config.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def version_tags(plan: Plan, *, cycle_id: str) -> dict[str, str]:
    """Tags of the registered version."""
    first, last = served_range(list(plan.rows))
    return {
        CYCLE: cycle_id,
        PARENT: str(plan.parent_version),
        "window_start": first.isoformat(timespec="seconds"),
        "window_end": last.isoformat(timespec="seconds"),
        REVIEW: "pending",
    }


def describe(plan: Plan, *, cycle_id: str, steps: Sequence[dict[str, float]], end: str) -> str:
    """The description of the version, Markdown; the gates add to it.

    Args:
        plan: The plan of the cycle.
        cycle_id: Name of the cycle.
        steps: Metrics of every measured step.
        end: How the cycle ended, in words.
    """
    window = window_metrics(plan)
    taken = sum("grad_norm" in step for step in steps)
    lines = [
        f"Trained by `{cycle_id}` from version {plan.parent_version} on {len(plan.rows)} rows "
        f"of {window['window/sessions']:.0f} sessions, "
        f"mean reward {window['window/reward_mean']:.3f}; "
        f"{taken} optimizer steps, {end}.",
        "",
        "| measured | first step | last step |",
        "|---|---:|---:|",
    ]
    for name, label in SHOWN:
        lines.append(f"| {label} | {steps[0][name]:.4f} | {steps[-1][name]:.4f} |")
    return "\n".join(lines)


def how_it_ended(history: History) -> str:
    """How the cycle ended, in words."""
    return "ran to its end" if history.stopped is None else f"stopped because {history.stopped}"
