"""The metrics of ingest, with their units. Counters start at 0 when the process starts."""

from prometheus_client import Counter, Gauge, Histogram

RECORDS = Counter("onlinerl_ingest_records", "Records read from the log.", ["topic"])
RECORD_BYTES = Counter("onlinerl_ingest_record_bytes", "Bytes of these records.", ["topic"])
ROWS = Counter("onlinerl_ingest_rows", "Rows committed.", ["table"])
REPEATED = Counter(
    "onlinerl_ingest_repeated_events", "Events skipped because they are stored already.", ["topic"]
)
WITHHELD = Counter(
    "onlinerl_ingest_withheld_events", "Events skipped because they carry no consent.", ["topic"]
)
DEAD_LETTERS = Counter(
    "onlinerl_ingest_dead_letters",
    "Records that broke the event contract, by what is wrong with them.",
    ["topic", "kind"],
)
UNTRAINABLE = Counter(
    "onlinerl_ingest_untrainable_rows", "Interaction rows kept that learning cannot use."
)
COMMITS = Counter("onlinerl_ingest_commits", "Batches committed.", ["topic"])
SORT_SECONDS = Histogram(
    "onlinerl_ingest_sort_seconds", "Time to turn the records of one batch into rows.", ["topic"]
)
COMMIT_SECONDS = Histogram("onlinerl_ingest_commit_seconds", "Time to commit one batch.", ["topic"])
BATCH_RECORDS = Histogram(
    "onlinerl_ingest_batch_records",
    "Records of one batch.",
    ["topic"],
    buckets=(1, 10, 100, 1_000, 5_000, 10_000, 20_000, 50_000, 100_000),
)
BATCH_BYTES = Histogram(
    "onlinerl_ingest_batch_bytes",
    "Bytes of the records of one batch.",
    ["topic"],
    buckets=tuple(1024.0 * 4**power for power in range(9)),
)
LAG = Gauge(
    "onlinerl_ingest_lag_records",
    "Records in the log that were not read yet, of the partitions that this process reads.",
    ["topic", "partition"],
)
BUFFERED_BYTES = Gauge(
    "onlinerl_ingest_buffered_bytes", "Bytes of records that wait for, or are in, a commit."
)
PAUSED = Gauge("onlinerl_ingest_paused_partitions", "Partitions not read until less is buffered.")
PARTITIONS = Gauge("onlinerl_ingest_partitions", "Partitions that this process reads.")
REASSIGNED = Counter(
    "onlinerl_ingest_reassignments", "Times the partitions of this process changed."
)
CONFLICTS = Counter(
    "onlinerl_ingest_conflicts",
    "Batches dropped because another process had stored their partition's records.",
)
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

ERASED = Counter(
    "onlinerl_ingest_erased_rows", "Rows left out because their person was erased.", ["table"]
)
SCRUB_FINDINGS = Counter(
    "onlinerl_ingest_scrub_findings", "Personal data and secrets found.", ["rule", "action"]
)
SCRUB_DROPPED = Counter(
    "onlinerl_ingest_scrub_dropped_rows", "Rows not stored because of what is in them.", ["table"]
)
