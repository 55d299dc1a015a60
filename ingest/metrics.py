"""The metrics of ingest, with their units. Counters start at 0 with the process."""

from prometheus_client import Counter, Gauge, Histogram

RECORDS = Counter("onlinerl_ingest_records", "Records read from the log.", ["topic"])
ROWS = Counter("onlinerl_ingest_rows", "Rows committed.", ["table"])
REPEATED = Counter(
    "onlinerl_ingest_repeated_events", "Events skipped because they are stored already.", ["topic"]
)
WITHHELD = Counter(
    "onlinerl_ingest_withheld_events", "Events skipped because they carry no consent.", ["topic"]
)
DEAD_LETTERS = Counter(
    "onlinerl_ingest_dead_letters", "Records that broke the event contract.", ["topic"]
)
UNTRAINABLE = Counter(
    "onlinerl_ingest_untrainable_rows", "Interaction rows kept that learning cannot use."
)
COMMIT_SECONDS = Histogram("onlinerl_ingest_commit_seconds", "Time to commit one batch.", ["topic"])
LAG = Gauge("onlinerl_ingest_lag_records", "Records in the log that were not read yet.")
RECREATED = Counter(
    "onlinerl_ingest_topics_recreated", "Times a topic came back under a new id, or changed."
)
RESTARTED = Counter(
    "onlinerl_ingest_positions_lost",
    "Times a stored offset was not in the log any more and reading went on at the earliest.",
    ["topic"],
)
UNAVAILABLE = Counter(
    "onlinerl_ingest_unavailable", "Times the log or the store did not answer and was retried."
)
