"""Which logged completions a cycle learns from, and why others are excluded.

Pure functions of candidates, which `source.py` reads.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from onlinerl.errors import TooFewRows
from onlinerl.trainer.rollouts.rows import WindowRow

Exclusion = Literal[
    "no_consent",
    "untrainable",
    "held_out",
    "already_trained",
    "unlabelled",
    "stale_version",
    "greedy",
    "raw_logprobs",
    "truncated_sampling",
    "too_long",
    "broken_history",
    "beyond_max_rows",
]
"""Why a completion is not in the window; the first of this list that applies.

`broken_history`: the prompt was built from an interaction that is missing or has no consent.
"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A completion of the policy, and the reason against learning from it."""

    row: WindowRow | None
    """None for a completion that is excluded."""
    exclusion: Exclusion | None


@dataclass(frozen=True, kw_only=True)
class WindowQuery:
    """What a completion must fulfil."""

    policy: str
    versions: frozenset[int]
    """Versions that are recent enough; one of them must have sampled each token of a completion."""
    heldout_fraction: float
    served_after: datetime
    max_row_tokens: int
    task_tag: str


@dataclass(frozen=True, kw_only=True)
class Window:
    """The rows of a cycle, oldest first, and how many completions each reason excluded."""

    rows: tuple[WindowRow, ...]
    excluded: dict[str, int]


def recent_versions(served: Sequence[int], *, champion: int, max_lag: int) -> frozenset[int]:
    """The champion and the `max_lag` versions that served before it.

    Args:
        served: Versions in the order in which they began to serve; a version may repeat.
        champion: The version that serves now.
        max_lag: Promotions after which a row is too old.
    """
    recent = [champion]
    for version in reversed(served):
        if len(recent) > max_lag:
            break
        if version not in recent:
            recent.append(version)
    return frozenset(recent)


def choose_window(candidates: Collection[Candidate], *, max_rows: int, min_rows: int) -> Window:
    """Take the newest `max_rows` rows, whose importance ratios are nearest to one.

    Raises:
        TooFewRows: fewer than `min_rows` are left; the message counts the excluded ones by reason.
    """
    excluded = Counter(c.exclusion for c in candidates if c.exclusion is not None)
    rows = sorted(
        (c.row for c in candidates if c.row is not None), key=lambda row: (row.served_at, row.key)
    )
    if len(rows) < min_rows:
        raise TooFewRows(
            f"{len(rows)} labelled rows to learn from, {min_rows} are needed "
            f"(trainer.min_labelled_rows); {_explain(excluded)}"
        )
    if len(rows) > max_rows:
        excluded["beyond_max_rows"] = len(rows) - max_rows
    counts = {str(reason): count for reason, count in sorted(excluded.items())}
    return Window(rows=tuple(rows[-max_rows:]), excluded=counts)


def _explain(excluded: Counter[Exclusion]) -> str:
    if not excluded:
        return "nothing else was logged"
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(excluded.items()))
    return f"left out: {counts}"
