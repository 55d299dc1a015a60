"""A progress bar for a person who runs a cycle in a terminal."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onlinerl.trainer.training.loop import OnStep


def terminal_progress(num_steps: int) -> OnStep:
    """Show a bar on stderr, unless stderr is not a terminal."""
    if not sys.stderr.isatty():
        return lambda number, metrics: None
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("k3 {task.fields[k3]:.4f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task("training", total=num_steps, k3=0.0)
    bar.start()

    def on_step(number: int, metrics: dict[str, float]) -> None:
        bar.update(task, completed=number + 1, k3=metrics["ratio/k3"])
        if number + 1 == num_steps or "grad_norm" not in metrics:
            bar.stop()

    return on_step
