"""The metrics of `onlinerl maintain`. Counters start at 0 when the process starts."""

from prometheus_client import Counter, Gauge

PASSES = Counter("onlinerl_maintain_passes", "Passes over all tables, by how they ended.", ["end"])
LAST_PASS = Gauge(
    "onlinerl_maintain_last_pass_timestamp_seconds", "When the last whole pass ended, Unix time."
)
PASS_SECONDS = Gauge("onlinerl_maintain_pass_seconds", "Duration of the last whole pass.")
COMPACTED = Counter(
    "onlinerl_maintain_compacted_files", "Small files gathered into larger ones.", ["table"]
)
CONFLICTS = Counter(
    "onlinerl_maintain_conflicts",
    "Compactions left to the next pass because rows were deleted meanwhile.",
    ["table"],
)
REMOVED = Counter("onlinerl_maintain_removed_files", "Data files removed by the vacuum.", ["table"])
LOG_REMOVED = Counter(
    "onlinerl_maintain_removed_log_files", "Files of table logs that were cleaned away.", ["table"]
)
HELD = Gauge("onlinerl_maintain_held_versions", "Versions held by snapshots and cycles.", ["table"])
TROUBLED = Counter(
    "onlinerl_maintain_troubled_tables", "Tables whose upkeep was left to the next pass.", ["table"]
)
