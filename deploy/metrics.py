"""Metric names of the deploy controller."""

from prometheus_client import Counter, Gauge, Histogram

DECISIONS = Counter(
    "onlinerl_deploy_decisions_total",
    "Decisions about a version, by action: bootstrap, promote, rollback, refuse, fail.",
    ["action"],
)
CHAMPION = Gauge("onlinerl_deploy_champion_version", "Registry version of the champion.")
REPLICAS = Gauge("onlinerl_deploy_replicas", "Engines, by state: ready, other.", ["state"])
SEEDS = Counter("onlinerl_deploy_seeds_total", "Swaps that brought an engine to the champion.")
ERRORS = Counter("onlinerl_deploy_errors_total", "Passes over the registry that ended in an error.")
PAUSE_MS = Histogram(
    "onlinerl_deploy_pause_milliseconds",
    "Longest time that an engine did not generate during a swap.",
    buckets=(10, 30, 100, 300, 1000, 3000, 10_000),
)
