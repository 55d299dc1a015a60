"""Reads the results of the demo from the tables and the registry."""

import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from examples.support_desk.desk import POLICY, Desk
from examples.support_desk.report import VersionLine
from examples.support_desk.users import Crowd
from onlinerl.rollout_store.tables.delta_store import DeltaStore
from onlinerl.rollout_store.views.connection import connect
from onlinerl.settings import Settings, load

if TYPE_CHECKING:
    from mlflow import MlflowClient

ROWS_TIMEOUT_S = 60.0
REFUSALS = ("refuse", "fail")


def query(desk: Desk, sql: str) -> list[dict[str, Any]]:
    """The rows of a query on the public views, by column name."""
    settings = _settings(desk)
    with connect(DeltaStore(settings.store_root), rewards=settings.rewards) as connection:
        cursor = connection.execute(sql)
        names = [column[0] for column in cursor.description or []]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def champion(desk: Desk) -> int:
    """The version that serves, from the table `promotions`; 1 before the first promotion."""
    rows = query(
        desk,
        "SELECT version FROM promotions WHERE action IN ('bootstrap', 'promote', 'rollback') "
        "ORDER BY decided_at DESC LIMIT 1",
    )
    return int(rows[0]["version"]) if rows else 1


def num_refused(desk: Desk) -> int:
    """Number of candidates that the gates refused."""
    return int(query(desk, "SELECT count(*) AS n FROM promotions WHERE action = 'refuse'")[0]["n"])


def newest_version(desk: Desk) -> int:
    """The highest registered version, whether it was promoted or not; 0 without any."""
    found = _client(desk.registry_url).search_model_versions(f"name = '{POLICY}'")
    return max((int(version.version) for version in found), default=0)


def wait_for_rows(desk: Desk, num_rows: int) -> None:
    """Wait until the table holds `num_rows` completions, or for a minute."""
    deadline = time.monotonic() + ROWS_TIMEOUT_S
    while time.monotonic() < deadline:
        if int(query(desk, "SELECT count(*) AS n FROM interactions")[0]["n"]) >= num_rows:
            return
        time.sleep(1.0)


def version_lines(desk: Desk, crowd: Crowd) -> list[VersionLine]:
    """A line for every version that was promoted, refused or given up, oldest first."""
    rows = query(desk, "SELECT * FROM promotions ORDER BY decided_at")
    measured = _gate_metrics(desk)
    return [
        _line(row, crowd, measured.get(int(row["version"]), {}))
        for row in rows
        if row["action"] in ("bootstrap", "promote", *REFUSALS)
    ]


def _line(row: dict[str, Any], crowd: Crowd, measured: dict[str, float]) -> VersionLine:
    name = f"{POLICY}/{row['version']}"
    rated = crowd.rated(name)
    answers = [answer for answer in crowd.answers if answer.version == name]
    words = {
        "bootstrap": "base model",
        "promote": "promoted",
        "refuse": "refused",
        "fail": "failed",
    }
    return VersionLine(
        version=int(row["version"]),
        num_rated=len(rated),
        num_accepted=sum(answer.accepted for answer in rated),
        mean_tokens=statistics.fmean(a.num_tokens for a in answers) if answers else 0.0,
        drift=measured.get("gate.drift"),
        perplexity_ratio=measured.get("gate.perplexity"),
        delta_bytes=row["delta_bytes"],
        full_bytes=row["full_bytes"],
        pause_ms=row["pause_ms"],
        logprob_diff=row["mean_abs_logprob_diff"],
        verdict=words[row["action"]],
        reason=str(row["reason"]) if row["action"] in REFUSALS else "",
    )


def figures(
    desk: Desk,
    crowd: Crowd,
    *,
    lines: Sequence[VersionLine],
    last: int,
    wall_s: float,
    rss_peak_gib: float,
) -> dict[str, float]:
    """The figures of the demo. Keys are stable, so that versions of the project can be compared."""
    promoted = [line for line in lines if line.verdict == "promoted"]
    refused = [line for line in lines if line.verdict == "refused"]
    first, best = lines[0], next(line for line in lines if line.version == last)
    served = {answer.interaction_id for answer in crowd.answers}
    rows = _stored_ids(desk)
    return {
        "accept_rate_first": first.accept_rate,
        "accept_rate_last": best.accept_rate,
        "accept_ci_first_hi": first.accept_high,
        "accept_ci_last_lo": best.accept_low,
        "num_rated_first": first.num_rated,
        "num_rated_last": best.num_rated,
        "perplexity_ratio": _known(best.perplexity_ratio),
        "versions_promoted": len(promoted),
        "versions_refused": len(refused),
        "requests_failed": len(crowd.failures),
        "served": len(served),
        "rows": len(rows),
        "distinct_ids": len(set(rows) & served),
        "mean_abs_logprob_diff_max": max(_known(line.logprob_diff) for line in [first, *promoted]),
        "pause_p50_ms": statistics.median(_known(line.pause_ms) for line in promoted),
        "delta_bytes_ratio": statistics.median(
            _known(line.delta_bytes) / _known(line.full_bytes) for line in promoted
        ),
        "wall_s": wall_s,
        "rss_peak_gib": rss_peak_gib,
    }


def _stored_ids(desk: Desk) -> list[str]:
    """Interaction ids from the table itself; a view would hide a row that is stored twice."""
    store = DeltaStore(_settings(desk).store_root)
    column = store.dataset("interactions").to_table(columns=["interaction_id"])
    return [str(value) for value in column["interaction_id"].to_pylist()]


def _known(value: float | None) -> float:
    """The value, or nan, so that a missing value does not look like a good figure."""
    return math.nan if value is None else float(value)


def _gate_metrics(desk: Desk) -> dict[int, dict[str, float]]:
    """Metrics of the runs that made the versions, by version."""
    client = _client(desk.registry_url)
    return {
        int(version.version): dict(client.get_run(version.run_id).data.metrics)
        for version in client.search_model_versions(f"name = '{POLICY}'")
    }


@functools.cache
def _client(url: str) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=url, registry_uri=url)


@functools.cache
def _settings(desk: Desk) -> Settings:
    return load(desk.config)
