"""The results of the demo: a line per version, figures, and whether they reach their targets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

Z_95 = 1.959964


@dataclass(frozen=True)
class VersionLine:
    """Ratings, gate results and swap of one policy version."""

    version: int
    num_rated: int
    num_accepted: int
    mean_tokens: float
    drift: float | None
    """k3 of the candidate to the champion on held-out answers, nats per token."""
    perplexity_ratio: float | None
    delta_bytes: int | None
    full_bytes: int | None
    pause_ms: float | None
    logprob_diff: float | None
    """Mean |engine - transformers| on the probe tokens after the swap, nats."""
    verdict: str
    reason: str = ""
    """Why it was refused; empty when it was not."""

    @property
    def accept_rate(self) -> float:
        """Share of rated answers that were accepted; nan without any."""
        return self.num_accepted / self.num_rated if self.num_rated else math.nan

    @property
    def accept_low(self) -> float:
        """Lower end of the 95 % interval."""
        return wilson(self.num_accepted, self.num_rated)[0]

    @property
    def accept_high(self) -> float:
        """Upper end of the 95 % interval."""
        return wilson(self.num_accepted, self.num_rated)[1]


def wilson(successes: int, trials: int, *, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return (centre - spread) / scale, (centre + spread) / scale


def version_table(lines: Sequence[VersionLine]) -> Table:
    """The versions as a table for a terminal."""
    table = Table(title="Policy versions", title_justify="left")
    for heading in (
        "version", "rated", "accepted, 95 %", "tokens", "drift k3", "perplexity",
        "delta", "pause", "|Δlogprob|", "verdict",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "verdict" else "right")
    for line in lines:
        table.add_row(
            f"v{line.version}",
            str(line.num_rated) if line.num_rated else "-",
            f"{line.accept_rate:.0%} [{line.accept_low:.0%}, {line.accept_high:.0%}]"
            if line.num_rated
            else "-",
            f"{line.mean_tokens:.0f}" if line.num_rated else "-",
            _number(line.drift, "{:.4f}"),
            _number(line.perplexity_ratio, "{:.3f}x"),
            f"{line.delta_bytes / 2**20:.0f} of {line.full_bytes / 2**20:.0f} MiB"
            if line.delta_bytes and line.full_bytes
            else "-",
            _number(line.pause_ms, "{:.0f} ms"),
            _number(line.logprob_diff, "{:.4f}"),
            line.verdict,
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


@dataclass(frozen=True)
class Target:
    """A figure that the project wants to reach."""

    name: str
    is_reached: bool
    measured: str
    """The measured value in words."""


def targets(figures: Mapping[str, float]) -> list[Target]:
    """All targets, reached or not, with the measured values."""
    first, last = figures["accept_rate_first"], figures["accept_rate_last"]
    return [
        Target(
            "accept rate at least doubled",
            last >= 2 * first,
            f"{first:.0%} -> {last:.0%} ({last / first:.2f}x)" if first else f"{last:.0%}",
        ),
        Target(
            "95 % intervals disjoint, on at least 150 rated answers each",
            figures["accept_ci_last_lo"] > figures["accept_ci_first_hi"]
            and min(figures["num_rated_first"], figures["num_rated_last"]) >= 150,
            f"first up to {figures['accept_ci_first_hi']:.0%}, "
            f"last from {figures['accept_ci_last_lo']:.0%}",
        ),
        Target(
            "perplexity at most 1.2 times the base's",
            figures["perplexity_ratio"] <= 1.2,
            f"{figures['perplexity_ratio']:.3f}x",
        ),
        Target(
            "at least three versions promoted, one refused",
            figures["versions_promoted"] >= 3 and figures["versions_refused"] >= 1,
            f"{figures['versions_promoted']:.0f} promoted, "
            f"{figures['versions_refused']:.0f} refused",
        ),
        Target(
            "no request failed or was cut off",
            figures["requests_failed"] == 0,
            f"{figures['requests_failed']:.0f} of {figures['served']:.0f}",
        ),
        Target(
            "served = rows = distinct ids",
            figures["served"] == figures["rows"] == figures["distinct_ids"],
            f"{figures['served']:.0f} = {figures['rows']:.0f} = {figures['distinct_ids']:.0f}",
        ),
        Target(
            "engine agrees with transformers within 0.01",
            figures["mean_abs_logprob_diff_max"] < 0.01,
            f"mean |Δlogprob| at most {figures['mean_abs_logprob_diff_max']:.4f}",
        ),
        Target(
            "under 15 minutes, installation included",
            figures["wall_s"] < 900,
            f"{figures['wall_s'] / 60:.1f} min",
        ),
        Target(
            "memory of the stack below 12 GiB",
            figures["rss_peak_gib"] < 12,
            f"{figures['rss_peak_gib']:.1f} GiB",
        ),
    ]
